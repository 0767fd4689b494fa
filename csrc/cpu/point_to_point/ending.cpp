// The end of a group's messages: what is still in the channels is delivered, peers on other hosts
// exchange close notices, and a channel is closed when no thread uses it.
#include <algorithm>
#include <thread>

#include "base/scoped_count.hpp"
#include "cpu/point_to_point/point_to_point.hpp"

namespace fastcoll {
namespace {

// How often flush() checks whether the receivers have taken everything.
constexpr std::chrono::microseconds kPoll{200};

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
void PointToPoint::leave(Lock& lock) {
  if (stopping_ && !memory_.aborted()) closeUnused(lock.inner);
  if (memory_.aborted()) failing_ = true;
  changed_.notify_all();
}

/// Closes the channels that no thread uses. The lock is free meanwhile, because the network may
/// have to end what it does with the memory of a transfer.
void PointToPoint::closeUnused(std::unique_lock<std::mutex>& lock) {
  for (int rank = 0; rank < memory_.size(); ++rank) {
    PeerConnection& remote = peers_[rank].remote;
    if (remote.channel == nullptr || remote.users > 0) continue;
    for (const PointToPointRef& op : all_) {
      if (op->body_ && op->other() == rank) op->body_.reset();
    }
    if (remote.isConnected()) remote.state = PeerConnection::State::None;
    ++remote.users;
    lock.unlock();
    remote.channel->close();
    lock.lock();
    --remote.users;
    remote.channel.reset();
    changed_.notify_all();
  }
}

/// Sends close notices to the peers on other hosts, and waits for theirs. Closing a connection may
/// drop what a peer has not read yet.
void PointToPoint::flushRemote(TimePoint until) {
  const ScopedCount<int> sleeps(sleepers_);
  Lock lock(*this);
  if (failing() || active()) return;
  until = std::min<TimePoint>(until, Clock::now() + Network::kGoodbye);
  const auto next = [until] { return std::min<TimePoint>(until, Clock::now() + kSlice); };
  const auto each = [this](auto use) {
    bool connected = false;
    for (int rank = 0; rank < memory_.size(); ++rank) {
      PeerConnection& remote = peers_[rank].remote;
      if (!remote.isConnected()) continue;
      connected = true;
      try {
        use(rank, remote);
      } catch (const ConnectionLost& error) {
        remote.lose(error.what());
      }
    }
    return connected;
  };
  if (!each([](int, PeerConnection& remote) { remote.channel->sendClose(); })) return;
  each([&](int, PeerConnection& remote) {
    const auto sends = remote.channel->takeSends(true);
    withoutLock(remote, lock, [&] {
      for (const TransferRef& send : sends) {
        while (!send->wait(next())) {
          if (memory_.aborted() || Clock::now() >= until) return;
        }
      }
    });
  });
  lock.unlock();
  setup_.network.drain(Clock::now() + Network::kDrain);
  lock.lock();
  each([&](int rank, PeerConnection& remote) {
    // A fault closes the channel.
    while (remote.isConnected() && !failing() && !remote.hasLeft() && Clock::now() < until) {
      if (remote.reading) {
        lock.wait(changed_, next());
      } else {
        read(rank, next(), lock);
      }
    }
  });
}

}  // namespace fastcoll
