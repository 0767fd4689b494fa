// How point-to-point meets its peers, and connects with those on other hosts. Only the two ranks of
// a pair take part. Pooled threads do it without the lock, because the store and the network may be
// slow. Messages with other peers go on meanwhile. If no thread can be started, a thread that has
// freed the lock does it.
//
// A rank that sends to a peer, or expects a message from it, posts that in the store. It then
// checks whether the peer has, too (see Rendezvous::tryConnect). A rank that receives from any
// source checks all peers. When both have posted, a thread of each connects.
#include <algorithm>
#include <utility>
#include <vector>

#include "base/worker_pool.hpp"
#include "cpu/point_to_point/point_to_point.hpp"

namespace fastcoll {
namespace {

constexpr std::chrono::microseconds kFirstPause{200};
constexpr std::chrono::microseconds kLongestPause{10000};

}  // namespace

/// Runs the job on a pooled thread; stop() waits for it. False if no thread could be started.
bool PointToPoint::startJob(std::function<void()> job) {
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
    return true;
  } catch (const std::exception& error) {
    --jobs_;
    warnNoThread(error);
    return false;
  }
}

/// Called under the lock when a peer is needed that was not met, or to which there is no
/// connection.
void PointToPoint::needPeers() {
  if (finds_ || stopping_) return;
  const auto now = Clock::now();
  if (now >= nextFind_) {
    finds_ = startJob([this] { findPeers(false); });
    if (finds_) return;
    findsHere_ = true;
    nextFind_ = now + kLongestPause;
  }
  nextTurn_ = std::min(nextTurn_, nextFind_);
}

/// Meets the peers that are needed, and polls for those that want to connect, as long as there are
/// such peers, or once.
void PointToPoint::findPeers(bool once) {
  struct Wanted {
    int rank;
    bool meets;  // else it connects
    bool asks;   // even if the peer does not
    std::string name = {};
    std::optional<Place> found = {};
  };
  auto pause = kFirstPause;
  Lock lock(*this);
  finds_ = true;
  for (;;) {
    std::vector<Wanted> wanted;
    for (int rank = 0; rank < memory_.size(); ++rank) {
      const Peer& peer = peers_[rank];
      const PeerConnection& remote = peer.remote;
      if (rank == memory_.rank()) continue;
      if (!peer.isMet() && (anyReceives_ > 0 || peer.busy() || peer.unmet())) {
        wanted.push_back({rank, true, false});
      }
      if (remote.state != PeerConnection::State::None) continue;
      if (peer.place != Place::Elsewhere && !remote.wanted) continue;
      const bool asks = remote.wanted || peer.expects(false);
      if (asks || anyReceives_ > 0) wanted.push_back({rank, false, asks});
    }
    if (wanted.empty() || stopping_ || failing()) break;
    lock.unlock();
    std::exception_ptr fault;
    try {
      for (Wanted& one : wanted) {
        one.found = one.meets ? rendezvous_.tryMeet(one.rank)
                              : rendezvous_.tryConnect(one.rank, one.asks, one.name);
        if (one.meets && one.found == Place::Here) setup_.spin.poll(rendezvous_);
      }
    } catch (const std::exception&) {
      fault = std::current_exception();
    }
    lock.lock();
    bool news = false, connects = false;
    for (const Wanted& one : wanted) {
      if (!one.found) break;
      Peer& peer = peers_[one.rank];
      if (one.meets) {
        news = setPlace(one.rank, *one.found) || news;
      } else if (one.found == Place::Pairing) {  // on this host, in another instance of the group
        if (peer.place == Place::Elsewhere) setPlace(one.rank, Place::Pairing);
        mayBeBusy_[one.rank] = 1;  // it may be unmet()
      } else if (one.found == Place::Here) {
        // Without a thread, retry later.
        if (startJob([this, rank = one.rank, name = one.name] { connectTo(rank, name); })) {
          peer.remote.state = PeerConnection::State::Connecting;
          connects = true;
        }
      }
    }
    if (news) progress(false);
    if (news || connects) {
      wakeBackground();
      changed_.notify_all();
    }
    const auto isWanted = [](const Peer& peer) { return peer.remote.wanted; };
    if (fault != nullptr && (active() || std::ranges::any_of(peers_, isWanted))) failWith(fault);
    // A job that connects may have to wait for this thread; the next turn starts another one here.
    if (once || connects || failing()) break;
    if (news) {
      pause = kFirstPause;
    } else {
      changed_.wait_for(lock.inner, pause, [this] { return stopping_; });
      pause = std::min(2 * pause, kLongestPause);
    }
  }
  finds_ = false;
}

/// Returns whether that is news, or the peer is Here.
bool PointToPoint::setPlace(int rank, Place place) {
  Place& now = peers_[rank].place;
  if (now == Place::Here && place != Place::Here) return false;  // an answer from before
  const Place before = std::exchange(now, place);
  // The peer may wait for what was posted before it could be woken.
  if (place == Place::Here) wake(rank);
  if (place == Place::Elsewhere) anyElsewhere_ = true;
  return place == Place::Here || (before == Place::NotYet && place != Place::NotYet);
}

void PointToPoint::connectTo(int rank, const std::string& name) {
  std::unique_ptr<RemoteChannel> channel;
  std::string how;           // it failed
  std::exception_ptr fault;  // whole; the network's error has a part of its text
  const auto check = [&] {
    try {
      rendezvous_.throwIfLost(rank);
    } catch (const std::exception&) {
      fault = std::current_exception();
      throw;
    }
  };
  try {
    channel = std::make_unique<RemoteChannel>(
        setup_.network.connect(name, memory_.rank() < rank, Network::kConnect, check));
  } catch (const std::exception& error) {
    how = error.what();
  }
  Lock lock(*this);
  PeerConnection& remote = peers_[rank].remote;
  if (channel != nullptr) {
    channel->setFull(full_);
    remote.open(std::move(channel));
    progress(false);
  } else {
    if (fault != nullptr && (active() || remote.wanted)) failWith(fault);
    noteLost(rank, how);
  }
  leave(lock);
  wakeBackground();
}

}  // namespace fastcoll
