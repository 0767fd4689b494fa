// The threads that make progress for point-to-point: those that wait for an operation, and one in
// the background for operations without a waiter.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <utility>

#include "base/entry_lock.hpp"
#include "base/interrupt.hpp"
#include "base/log.hpp"
#include "base/scoped_count.hpp"
#include "base/thread.hpp"
#include "cpu/point_to_point/point_to_point.hpp"

namespace fastcoll {
namespace {

// How often the background thread checks whether other threads make progress. kLinger: how long it
// stays when nothing is pending.
constexpr std::chrono::milliseconds kTick{1};
constexpr std::chrono::milliseconds kLongTick{8};
constexpr std::chrono::milliseconds kLinger{100};
// Time for pooled threads to end with the group.
constexpr std::chrono::milliseconds kJobsEnd{2000};
// Shortest sleep while something may happen that does not ring the doorbell.
constexpr std::chrono::microseconds kShortSleep{200};

}  // namespace

bool PointToPoint::wait(const PointToPointRef& op, TimePoint until) {
  for (;;) {
    const bool elsewhere = isElsewhere(*op);
    if (elsewhere) beforeWait();
    const auto done = elsewhere ? waitElsewhere(op, until) : waitHere(*op, until);
    if (done) return *done;
  }
}

/// See wait(). For peers of this host, and any source; nullopt if the peer turns out to be on
/// another host.
std::optional<bool> PointToPoint::waitHere(const PointToPointOp& op, TimePoint until) {
  const ScopedCount<int> counted(waiters_);
  const auto spin = std::chrono::microseconds(setup_.spin.micros());
  unsigned idle = 0;  // rounds since something moved
  TimePoint idleSince;
  TimePoint checked = TimePoint::min();  // for signals
  while (!op.done.load(std::memory_order_acquire)) {
    bool moved = false;
    if (const Lock lock(*this, std::try_to_lock); lock.inner.owns_lock()) moved = progress(false);
    if (op.done.load(std::memory_order_acquire)) break;
    if (!moved && spin.count() > 0 && ++idle < kBriefSpins) {
      if (idle == kSpinsWithLock) beforeWait();
      cpuRelax();
      continue;
    }
    beforeWait();
    const auto now = Clock::now();
    if (now >= until) return false;
    if (checked == TimePoint::min()) checked = now;
    if (now - checked > Milliseconds(20)) {
      checked = now;
      checkInterrupt();
    }
    if (moved) {
      idle = 0;
      continue;
    }
    if (idle == kBriefSpins) idleSince = now;
    if (spin.count() > 0 && now - idleSince < spin) {
      // From here on the peer may need this core: yield it.
      ::sched_yield();
      for (int i = 0; i < 8; ++i) cpuRelax();
      continue;
    }
    checkInterrupt();
    if (isElsewhere(op)) return std::nullopt;  // it was met meanwhile
    if (sleep(&op, until - now)) idle = 0;
  }
  return true;
}

/// Makes progress once more, and sleeps until the doorbell rings or a slice has passed. True if
/// something has moved, the doorbell has rung, or the operation is done.
bool PointToPoint::sleep(const PointToPointOp* op, std::chrono::nanoseconds most) {
  Doorbell& bell = memory_.doorbell(memory_.rank());
  const ScopedCount<std::uint32_t> announced(bell.waiters);
  const std::uint64_t rings = bell.rings.load(std::memory_order_seq_cst);
  bool moved = false;
  // The holder of the lock may have checked before this thread announced itself, and may not check
  // again. So sleep briefly.
  std::chrono::nanoseconds slice = kShortSleep;
  if (const Lock lock(*this, std::try_to_lock); lock.inner.owns_lock()) {
    moved = progress(true);
    serveNetwork();
    slice = std::clamp<std::chrono::nanoseconds>(
        nextTurn_ == TimePoint::max() ? std::chrono::nanoseconds::max() : nextTurn_ - Clock::now(),
        kShortSleep, kWaitSlice);
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
    changed_.notify_all();
    // Threads wait in slices, but the store or the network may block one longer.
    changed_.wait_for(lock, kJobsEnd, [this] {
      return jobs_ == 0 && std::ranges::all_of(peers_, [](const Peer& peer) {
               return peer.remote.users == (peer.remote.borrowed ? 1 : 0);
             });
    });
    closeUnused(lock);
  }
  if (!thread_.joinable()) return;
  wakeBackground();
  thread_.join();
}

/// Wakes the background thread, which may sleep on the doorbell.
void PointToPoint::wakeBackground() {
  if (memory_.isOpen()) wake(memory_.rank());
  background_.notify_all();
}

/// Called under the lock when something is pending. Without a thread, only waits make progress.
void PointToPoint::needBackground() {
  if (threadIdle_) {
    threadIdle_ = false;
    background_.notify_all();
  }
  if (threadRuns_ || stopping_) return;
  if (thread_.joinable()) thread_.join();
  try {
    thread_ = startThread([this] { serveInBackground(); });
    threadRuns_ = true;
  } catch (const std::exception& error) {
    warnNoThread(error);
  }
}

void PointToPoint::warnNoThread(const std::exception& error) {
  if (std::exchange(warned_, true)) return;
  log(LogLevel::Warn,
      "no thread could be started, so send and recv proceed only while this rank waits for "
      "one: ",
      error.what(), kMoreThreads);
}

// The background thread only watches while other threads make progress often enough. When none has
// for a tick, it makes progress itself and sleeps on the doorbell, so the peers wake it.
void PointToPoint::serveInBackground() {
  ::pthread_setname_np(::pthread_self(), "fastcoll-p2p");
  Lock lock(*this);
  std::uint64_t turns = turns_;
  auto tick = kTick;
  bool alone = false;
  while (!stopping_) {
    if (alone && restless() && waiters_.load(std::memory_order_relaxed) == 0) {
      const std::uint64_t before = turns_;
      threadSleeps_ = true;
      if (memory_.isOpen()) {
        lock.unlock();
        sleep(nullptr, kWaitSlice);
        lock.lock();
      } else {
        progress(true);
        serveNetwork();
        lock.wait(background_, std::min<TimePoint>(Clock::now() + kWaitSlice, nextTurn_));
      }
      threadSleeps_ = false;
      turns = turns_;
      alone = turns - before <= 1;  // only its own call
      continue;
    }
    alone = false;
    lock.wait(background_, Clock::now() + tick);
    if (stopping_) break;
    const bool served = std::exchange(turns, turns_) != turns_;
    const bool waitedFor = waiters_.load(std::memory_order_relaxed) != 0;
    tick = waitedFor ? std::min(2 * tick, kLongTick) : kTick;
    serveNetwork();  // other threads may serve other peers only
    lock.unlock();
    setup_.spin.poll(rendezvous_);
    lock.lock();
    alone = !served && !waitedFor && restless();
    if (served || waitedFor || alone) continue;
    threadIdle_ = true;
    background_.wait_for(lock.inner, kLinger, [this] { return stopping_ || !threadIdle_; });
    if (std::exchange(threadIdle_, false)) break;
  }
  threadRuns_ = false;
}

}  // namespace fastcoll
