#include "base/interrupt.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace fastcoll {
namespace {
std::atomic<InterruptCheck> installed{nullptr};
}  // namespace

void setInterruptCheck(InterruptCheck check) {
  installed.store(check, std::memory_order_release);
}

void checkInterrupt() {
  const InterruptCheck check = installed.load(std::memory_order_acquire);
  // Python delivers signals on the main thread only: the thread whose id is the pid.
  if (check != nullptr && ::syscall(SYS_gettid) == ::getpid()) check();
}

}  // namespace fastcoll
