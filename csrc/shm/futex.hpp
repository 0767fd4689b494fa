// Futexes shared between processes: thin wrappers of the system call.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace fastcoll {

/// Sleeps while *word == expected, at most `slice`. Returns on wake-up, timeout, signal or
/// mismatch; the caller re-checks its condition in every case. Not FUTEX_PRIVATE: the word may be
/// mapped by several processes.
inline void futexWait(const std::atomic<std::uint32_t>* word, std::uint32_t expected,
                      std::chrono::nanoseconds slice) {
  if (slice.count() <= 0) return;
  const timespec time{static_cast<time_t>(slice.count() / 1000000000),
                      static_cast<long>(slice.count() % 1000000000)};
  ::syscall(SYS_futex, word, FUTEX_WAIT, expected, &time, nullptr, 0);
}

/// Wakes every sleeper on the word.
inline void futexWakeAll(const std::atomic<std::uint32_t>* word) {
  ::syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// The half of a 64-bit counter that changes with every increment, for a 32-bit futex.
inline const std::atomic<std::uint32_t>* lowHalf(const std::atomic<std::uint64_t>* counter) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  return reinterpret_cast<const std::atomic<std::uint32_t>*>(counter);
#else
  return reinterpret_cast<const std::atomic<std::uint32_t>*>(counter) + 1;
#endif
}

/// Hints to the core that this is a spin loop.
inline void cpuRelax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace fastcoll
