#include "base/interrupt.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <utility>

namespace fastcoll {
namespace {
std::atomic<InterruptCheck> installed{nullptr};
thread_local bool interrupted = false;
}  // namespace

void setInterruptCheck(InterruptCheck check) {
  installed.store(check, std::memory_order_release);
}

void checkInterrupt() {
  const InterruptCheck check = installed.load(std::memory_order_acquire);
  // Python delivers signals on the main thread only: the thread whose id is the pid.
  if (check == nullptr || ::syscall(SYS_gettid) != ::getpid()) return;
  try {
    check();
  } catch (...) {
    interrupted = true;
    throw;
  }
}

bool wasInterrupted() {
  return std::exchange(interrupted, false);
}

}  // namespace fastcoll
