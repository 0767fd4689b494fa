#include "shm/futex.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace fastcoll {

void futexWait(const std::atomic<std::uint32_t>* word, std::uint32_t expected,
               std::chrono::nanoseconds slice) {
  if (slice.count() <= 0) return;
  timespec time{};
  time.tv_sec = static_cast<time_t>(slice.count() / 1000000000);
  time.tv_nsec = static_cast<long>(slice.count() % 1000000000);
  ::syscall(SYS_futex, word, FUTEX_WAIT, expected, &time, nullptr, 0);
}

void futexWakeAll(const std::atomic<std::uint32_t>* word) {
  ::syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace fastcoll
