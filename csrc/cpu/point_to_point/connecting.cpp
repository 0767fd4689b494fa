// How point-to-point meets its peers, and connects with those on other hosts. Only the two ranks of
// a pair take part. Pooled threads do it without the lock, because the store and the network may be
// slow. Messages with other peers go on meanwhile.
//
// A rank that sends to a peer, or expects a message from it, posts that in the store. It then
// checks whether the peer has, too (see Rendezvous::tryConnect). A rank that receives from any
// source checks all peers. When both have posted, a thread of each connects.
#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/point_to_point/point_to_point.hpp"
#include "cpu/worker_pool.hpp"

namespace fastcoll {
namespace {

constexpr std::chrono::microseconds kFirstPause{200};
constexpr std::chrono::microseconds kLongestPause{10000};

}  // namespace

/// Runs the job on a pooled thread; stop() waits for it.
void PointToPoint::startJob(std::function<void()> job) {
  ++jobs_;
  try {
    runOnWorker([this, owner = setup_.owner.lock(), job = std::move(job)]() mutable {
      job();
      job = nullptr;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        --jobs_;
        changed_.notify_all();
      }
      owner.reset();
    });
  } catch (...) {
    --jobs_;
    throw;
  }
}

/// Called under the lock when a peer is needed that has not been met.
void PointToPoint::needToMeet(int rank) {
  // Collectives have met it. Or it has died, and what it wrote before counts.
  if (memory_.isConfirmed(rank) ||
      (memory_.isDead(rank) && memory_.isMutual(rank, memory_.nonceOf(rank)))) {
    setPlace(rank, Place::Here);
    return;
  }
  const auto now = Clock::now();
  if (!meets_ && !stopping_ && now >= nextMeet_) {
    try {
      startJob([this] { meetPeers(); });
      meets_ = true;
    } catch (const std::exception&) {  // no thread: do it here
      setPlace(rank, rendezvous_.tryMeet(rank));
    }
    nextMeet_ = now + std::min(kLongestPause, kFirstPause * (1 << std::min(looksInVain_++, 6)));
  }
  lookAt_ = std::min(lookAt_, std::max(nextMeet_, now + kFirstPause));
}

/// Tries once to meet each peer that is needed and has not been met.
void PointToPoint::meetPeers() {
  std::vector<int> wanted;
  Finished finished;
  Lock lock(mutex_);
  for (int rank = 0; rank < memory_.size(); ++rank) {
    const Peer& peer = peers_[rank];
    if (peer.isMet() || rank == memory_.rank()) continue;
    if (anyReceives_ > 0 || peer.busy() || peer.unmet()) wanted.push_back(rank);
  }
  lock.unlock();
  std::vector<std::pair<int, Place>> found;
  std::exception_ptr fault;
  try {
    for (const int rank : wanted) found.emplace_back(rank, rendezvous_.tryMeet(rank));
  } catch (const std::exception&) {
    fault = std::current_exception();
  }
  const auto isHere = [](const auto& one) { return one.second == Place::Here; };
  if (std::ranges::any_of(found, isHere)) setup_.spin.poll(rendezvous_);
  lock.lock();
  meets_ = false;
  bool news = false;
  for (const auto& [rank, place] : found) news = setPlace(rank, place) || news;
  if (news) {
    looksInVain_ = 0;
    progress(finished, false);
    wakeBackground();
    changed_.notify_all();
  }
  if (fault != nullptr && active()) failWith(fault, finished);  // else the next operation raises it
  lock.unlock();
  complete(finished);
}

/// Returns whether that is news, or the peer is Here.
bool PointToPoint::setPlace(int rank, Place place) {
  Place& now = peers_[rank].place;
  if (now == Place::Here && place != Place::Here) return false;  // an answer from before
  const Place before = std::exchange(now, place);
  // The peer may wait for what was posted before it could be rung.
  if (place == Place::Here) ring(rank);
  if (place == Place::Elsewhere) anyElsewhere_ = true;
  return place == Place::Here || (before == Place::NotYet && place != Place::NotYet);
}

/// Called under the lock when a peer is needed to which there is no connection.
void PointToPoint::needConnections() {
  if (connects_ || stopping_) return;
  try {
    startJob([this] { connectPeers(); });
    connects_ = true;
  } catch (const std::exception& error) {  // no thread: retry at the next look
    warnNoThread(error);
    lookAt_ = std::min<TimePoint>(lookAt_, Clock::now() + kLongestPause);
  }
}

/// Polls for peers that want to connect, as long as this rank wants to.
void PointToPoint::connectPeers() {
  auto pause = kFirstPause;
  Finished finished;
  Lock lock(mutex_);
  for (;;) {
    std::vector<std::pair<int, bool>> wanted;
    for (int rank = 0; rank < memory_.size(); ++rank) {
      const Peer& peer = peers_[rank];
      const PeerConnection& remote = peer.remote;
      if (remote.state != PeerConnection::State::None) continue;
      if (peer.place != Place::Elsewhere && !remote.wanted) continue;
      const bool named = remote.wanted || peer.expects(false);
      if (named || anyReceives_ > 0) wanted.emplace_back(rank, named);
    }
    if (wanted.empty() || stopping_ || memory_.aborted()) break;
    lock.unlock();
    std::vector<std::pair<int, std::string>> met;
    std::vector<int> moved;  // to this host, in another instance of the group
    std::exception_ptr fault;
    try {
      for (const auto& [rank, named] : wanted) {
        std::string name;
        switch (rendezvous_.tryConnect(rank, named, name)) {
          case Rendezvous::Met::Here:
            met.emplace_back(rank, std::move(name));
            break;
          case Rendezvous::Met::Pairing:
            moved.push_back(rank);
            break;
          default:
            break;
        }
      }
    } catch (const std::exception&) {
      fault = std::current_exception();
    }
    lock.lock();
    if (fault != nullptr) {
      failWith(fault, finished);
      break;
    }
    for (const int rank : moved) {
      if (peers_[rank].place == Place::Elsewhere) setPlace(rank, Place::Pairing);
      mayBeBusy_[rank] = 1;  // it may be unmet()
    }
    for (const auto& [rank, name] : met) {
      peers_[rank].remote.connect();
      startJob([this, peer = rank, name = name] { connectTo(peer, name); });
    }
    // That job may have to wait for this thread; the next look starts another one here.
    if (!met.empty()) {
      wakeBackground();
      break;
    }
    lock.unlock();
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
    lock.lock();
  }
  connects_ = false;
  lock.unlock();
  complete(finished);
}

void PointToPoint::connectTo(int rank, const std::string& name) {
  std::unique_ptr<RemoteChannel> channel;
  std::string how;           // it failed
  std::exception_ptr fault;  // whole; the network's error has a part of its text
  const auto look = [&] {
    try {
      rendezvous_.throwIfLost(rank);
    } catch (const std::exception&) {
      fault = std::current_exception();
      throw;
    }
  };
  try {
    channel = std::make_unique<RemoteChannel>(
        setup_.network.get()->connect(name, memory_.rank() < rank, Network::kConnect, look));
  } catch (const std::exception& error) {
    how = error.what();
  }
  Finished finished;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    PeerConnection& remote = peers_[rank].remote;
    if (channel != nullptr) {
      channel->setFull(full_);
      remote.open(std::move(channel));
      progress(finished, false);
    } else {
      if (fault != nullptr && (active() || remote.wanted)) failWith(fault, finished);
      noteLost(rank, how, finished);
    }
    leave(finished);
    wakeBackground();
  }
  complete(finished);
}

}  // namespace fastcoll
