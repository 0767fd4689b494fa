// The end of a group's messages: what is still in the channels is delivered, peers on other hosts
// exchange close notices, and a channel is closed when no thread uses it.
#include <algorithm>
#include <thread>

#include "base/scoped_count.hpp"
#include "cpu/point_to_point/point_to_point.hpp"

namespace fastcoll {
namespace {

// How often flush() looks whether the receivers, or the network, have taken everything.
constexpr std::chrono::microseconds kPoll{200};
// How often a wait for a close notice checks whether the group has failed.
constexpr Milliseconds kLook{20};

}  // namespace

bool PointToPoint::flush(TimePoint until) {
  if (anyElsewhere_) flushRemote(until);
  for (;;) {
    bool all = true;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (int rank = 0; rank < memory_.size(); ++rank) {
        const auto& out = peers_[rank].out;
        if (!out || memory_.isDead(rank) || memory_.hasLeft(rank)) continue;
        // A send ends when its last bytes are in the ring. The receiver may not have read them yet.
        all = all && out->taken();
      }
    }
    if (all || memory_.aborted()) return true;
    if (Clock::now() >= until) return false;
    std::this_thread::sleep_for(kPoll);
  }
}

/// Called by a thread that has used a channel without the lock. Ends what waited for that.
void PointToPoint::leave(Finished& finished) {
  if (memory_.aborted()) {
    failAllLocked(finished);
  } else if (stopping_) {
    closeUnused();
  }
  changed_.notify_all();
}

/// Closes the channels that no thread uses.
void PointToPoint::closeUnused() {
  for (const PointToPointRef& op : all_) {
    if (!op->body_) continue;
    const int rank = op->send ? op->peer : op->source;
    if (peers_[rank].remote.users == 0) op->body_.reset();
  }
  for (Peer& peer : peers_) peer.remote.closeUnused();
}

/// Sends close notices to the peers on other hosts, and waits for theirs. Closing a connection may
/// drop what a peer has not read yet.
void PointToPoint::flushRemote(TimePoint until) {
  const ScopedCount<int> sleeps(sleepers_);
  Finished finished;
  {
    Lock lock(mutex_);
    if (memory_.aborted() || active()) return;
    until = std::min<TimePoint>(until, Clock::now() + Network::kGoodbye);
    const auto each = [this](auto use) {
      for (int rank = 0; rank < memory_.size(); ++rank) {
        PeerConnection& remote = peers_[rank].remote;
        if (!remote.isConnected()) continue;
        try {
          use(rank, remote);
        } catch (const ConnectionLost& error) {
          remote.lose(error.what());
        }
      }
    };
    bool connected = false;
    each([&connected](int, PeerConnection& remote) {
      connected = true;
      remote.channel->sayGoodbye();
    });
    if (!connected) return;
    for (;;) {
      bool sent = true;
      each([&sent](int, PeerConnection& remote) { sent = remote.channel->sent() && sent; });
      if (sent || memory_.aborted() || Clock::now() >= until) break;
      lock.unlock();
      std::this_thread::sleep_for(kPoll);
      lock.lock();
    }
    lock.unlock();
    setup_.network.get()->drain(Clock::now() + Network::kDrain);
    lock.lock();
    each([&](int rank, PeerConnection& remote) {
      // A fault closes the channel.
      while (remote.isConnected() && !memory_.aborted() && !remote.hasLeft() &&
             Clock::now() < until) {
        const auto next = std::min<TimePoint>(until, Clock::now() + kLook);
        if (remote.reading) {
          changed_.wait_until(lock, next);
        } else {
          read(rank, next, lock, finished);
        }
      }
    });
  }
  complete(finished);
}

}  // namespace fastcoll
