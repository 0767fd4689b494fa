// Waits for a word of shared memory: spin for a short time, then sleep on a futex in slices.
// Between slices, check for everything that would make the wait endless.
//
// No wake-up is lost. The waiter announces itself (waiters, seq_cst) before it reads the word for
// the last time; the writer stores the word (seq_cst) before it reads `waiters`. So one of the two
// sees the other. The kernel compares the word again before it puts the waiter to sleep.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "base/clock.hpp"
#include "base/entry_lock.hpp"
#include "shm/futex.hpp"

namespace fastcoll {

constexpr std::chrono::milliseconds kWaitSlice{50};
constexpr int kBriefSpins = 128;    // a few microseconds without a system call
constexpr int kSpinsWithLock = 32;  // about a microsecond with the entry lock held

/// Waits until the word is at least `target`. Between slices it calls policy.shouldStop(): true if
/// the word will never be ready, or not in time; it may throw on Ctrl-C. If the word is still not
/// ready then, it calls policy.throwStopReason().
template <typename Policy>
void waitOn(const std::atomic<std::uint64_t>& word, std::atomic<std::uint32_t>& waiters,
            std::uint64_t target, int spinMicros, Policy& policy) {
  const auto ready = [target](std::uint64_t value) { return value >= target; };
  if (ready(word.load(std::memory_order_acquire))) return;
  if (spinMicros > 0) {
    for (int i = 0; i < kBriefSpins; ++i) {
      if (i == kSpinsWithLock) beforeWait();
      cpuRelax();
      if (ready(word.load(std::memory_order_acquire))) return;
    }
    // From here on the peer may be waiting for this core, so yield it.
    const auto end = Clock::now() + std::chrono::microseconds(spinMicros);
    do {
      ::sched_yield();
      for (int i = 0; i < 16; ++i) {
        cpuRelax();
        if (ready(word.load(std::memory_order_acquire))) return;
      }
    } while (Clock::now() < end);
  }
  beforeWait();
  for (;;) {
    if (policy.shouldStop()) {
      // The peer may have written the word before it exited; then the word counts.
      if (ready(word.load(std::memory_order_acquire))) return;
      policy.throwStopReason();
    }
    waiters.fetch_add(1, std::memory_order_seq_cst);
    const std::uint64_t seen = word.load(std::memory_order_seq_cst);
    if (!ready(seen)) {
      const auto left = policy.deadline() - Clock::now();
      const auto slice = std::min<std::chrono::nanoseconds>(
          kWaitSlice, std::chrono::duration_cast<std::chrono::nanoseconds>(left));
      futexWait(lowHalf(&word), static_cast<std::uint32_t>(seen), slice);
    }
    waiters.fetch_sub(1, std::memory_order_relaxed);
    if (ready(word.load(std::memory_order_acquire))) return;
  }
}

/// Stores the word and wakes the ranks that sleep on it.
inline void publishWord(std::atomic<std::uint64_t>& word, const std::atomic<std::uint32_t>& waiters,
                        std::uint64_t value) {
  word.store(value, std::memory_order_seq_cst);
  if (waiters.load(std::memory_order_seq_cst) != 0) futexWakeAll(lowHalf(&word));
}

}  // namespace fastcoll
