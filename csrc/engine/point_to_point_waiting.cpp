// Who makes point-to-point's progress: the threads that wait for an operation, and one in the
// background for what nobody waits for.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <utility>

#include "../base/counted.hpp"
#include "../base/interrupt.hpp"
#include "../base/log.hpp"
#include "../base/thread.hpp"
#include "point_to_point.hpp"

namespace fastcoll {
namespace {

// How often the background thread looks whether somebody else makes progress, and how long it stays
// when there is none to make.
constexpr std::chrono::milliseconds kTick{1};
constexpr std::chrono::milliseconds kLongTick{8};
constexpr std::chrono::milliseconds kLinger{100};
// For pooled threads to end with the group.
constexpr std::chrono::milliseconds kJobsEnd{2000};
// A sleep while something may happen that rings no bell, at the least.
constexpr std::chrono::microseconds kShortSleep{200};

}  // namespace

bool PointToPoint::wait(const PointToPointRef& op, TimePoint until) {
  for (;;) {
    const auto done = isElsewhere(*op) ? waitElsewhere(op, until) : waitHere(*op, until);
    if (done) return *done;
  }
}

/// See wait(). For peers of this host, and any; nothing when the peer turns out to be elsewhere.
std::optional<bool> PointToPoint::waitHere(const PointToPointOp& op, TimePoint until) {
  const Counted<int> counted(waiters_);
  const auto spin = std::chrono::microseconds(spinMicros_);
  int idle = 0;  // rounds since something moved
  TimePoint idleSince;
  TimePoint looked = Clock::now();  // for signals
  while (!op.done.load(std::memory_order_acquire)) {
    Finished finished;
    bool moved = false;
    if (std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock); lock.owns_lock()) {
      moved = progress(finished, false);
      lock.unlock();
      complete(finished);
    }
    if (op.done.load(std::memory_order_acquire)) break;
    if (!moved && spin.count() > 0 && ++idle < kBriefSpins) {
      cpuRelax();
      continue;
    }
    const auto now = Clock::now();
    if (now >= until) return false;
    if (now - looked > Milliseconds(20)) {
      looked = now;
      checkInterrupt();
    }
    if (moved) {
      idle = 0;
      continue;
    }
    if (idle == kBriefSpins) idleSince = now;
    if (spin.count() > 0 && now - idleSince < spin) {
      idle = kBriefSpins + 1;
      // From here on the peer may be waiting for this very core: offer it.
      ::sched_yield();
      for (int i = 0; i < 8; ++i) cpuRelax();
      continue;
    }
    checkInterrupt();
    if (isElsewhere(op)) return std::nullopt;  // it was met meanwhile
    if (sleep(&op, finished, until - now)) idle = 0;
    if (spin.count() > 0 && idle != 0) idle = kBriefSpins + 1;
  }
  return true;
}

/// Looks at everything once more and sleeps until the bell rings, or for a slice. True when
/// something has moved, or the operation is done.
bool PointToPoint::sleep(const PointToPointOp* op, Finished& finished,
                         std::chrono::nanoseconds most) {
  auto& bell = memory_.own().doorbell;
  const Counted<std::uint32_t> announced(bell.waiters);
  const std::uint64_t rings = bell.rings.load(std::memory_order_seq_cst);
  finished.clear();
  bool moved = false;
  // Whoever holds the lock may have looked before this thread announced itself, and may not look
  // again.
  std::chrono::nanoseconds slice = kShortSleep;
  if (std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock); lock.owns_lock()) {
    moved = progress(finished, true);
    callReaders();
    callHelpers();
    slice = std::clamp<std::chrono::nanoseconds>(
        lookAt_ == TimePoint::max() ? std::chrono::nanoseconds::max() : lookAt_ - Clock::now(),
        kShortSleep, kWaitSlice);
    lock.unlock();
    complete(finished);
  }
  if (moved || (op != nullptr && op->done.load(std::memory_order_seq_cst))) return true;
  futexWait(lowHalf(&bell.rings), static_cast<std::uint32_t>(rings), std::min(slice, most));
  return bell.rings.load(std::memory_order_seq_cst) != rings;
}

void PointToPoint::stop() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    stopping_ = true;
    background_.notify_all();
    // Threads wait in slices, but the store or the network may keep one longer.
    changed_.wait_for(lock, kJobsEnd, [this] {
      return jobs_ == 0 && std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
               return peer.users == (peer.lent ? 1 : 0);
             });
    });
    closeUnused();
  }
  if (!thread_.joinable()) return;
  wakeBackground();
  thread_.join();
}

/// It may sleep on the bell.
void PointToPoint::wakeBackground() {
  if (memory_.isOpen()) ring(memory_.rank());
  background_.notify_all();
}

/// Called under the lock when something is under way. Without a thread, waits alone move it.
void PointToPoint::needBackground() {
  if (threadRests_) {
    threadRests_ = false;
    background_.notify_all();
  }
  if (threadRuns_ || stopping_) return;
  if (thread_.joinable()) thread_.join();
  try {
    thread_ = startThread([this] { serveInBackground(); });
    threadRuns_ = true;
  } catch (const std::exception& error) {
    if (!std::exchange(warned_, true)) {
      log(LogLevel::Warn,
          concat("no thread could be started, so send and recv proceed only while this rank "
                 "waits for one: ",
                 error.what(), kMoreThreads));
    }
  }
}

// It keeps out of the way while others look often enough. Only when nobody has looked for a tick
// does it look itself, and sleep on the bell, which makes the peers ring it.
void PointToPoint::serveInBackground() {
  ::pthread_setname_np(::pthread_self(), "fastcoll-p2p");
  std::unique_lock<std::mutex> lock(mutex_);
  std::uint64_t looks = looks_;
  auto tick = kTick;
  bool alone = false;
  while (!stopping_) {
    if (alone && restless() && waiters_.load(std::memory_order_relaxed) == 0) {
      const std::uint64_t before = looks_;
      threadSleeps_ = true;
      Finished finished;
      if (memory_.isOpen()) {
        lock.unlock();
        sleep(nullptr, finished, kWaitSlice);
        lock.lock();
      } else {
        progress(finished, true);
        callReaders();
        callHelpers();
        const auto next = std::min<TimePoint>(Clock::now() + kWaitSlice, lookAt_);
        if (finished.empty()) background_.wait_until(lock, next);
        lock.unlock();
        complete(finished);
        lock.lock();
      }
      threadSleeps_ = false;
      looks = looks_;
      alone = looks - before <= 1;  // its own
      continue;
    }
    alone = false;
    background_.wait_for(lock, tick);
    if (stopping_) break;
    const bool looked = std::exchange(looks, looks_) != looks_;
    const bool waitedFor = waiters_.load(std::memory_order_relaxed) != 0;
    tick = waitedFor ? std::min(2 * tick, kLongTick) : kTick;
    callReaders();  // whoever waits or looks may do so for another peer
    callHelpers();
    lock.unlock();
    setup_.met();
    lock.lock();
    if (looked || waitedFor) continue;
    if (restless()) {
      alone = true;
      continue;
    }
    threadRests_ = true;
    background_.wait_for(lock, kLinger, [this] { return stopping_ || !threadRests_; });
    if (!threadRests_) continue;
    threadRests_ = false;
    break;
  }
  threadRuns_ = false;
}

}  // namespace fastcoll
