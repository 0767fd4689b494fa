// The only way in which the host waits for a device. It polls, so it notices Ctrl-C, a deadline,
// and the end of the group.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/clock.hpp"
#include "base/interrupt.hpp"

namespace fastcoll {

/// Returns true once `ended()` is true, and false if `until` passes first. Throws what
/// checkInterrupt() or `ended` throws.
template <typename Ended>
bool waitOnHost(Ended&& ended, TimePoint until) {
  // Between two polls: short compared with a collective on a device.
  constexpr std::chrono::microseconds kFirst{20};
  constexpr std::chrono::microseconds kLast{1000};
  auto pause = kFirst;
  while (!ended()) {
    if (Clock::now() >= until) return false;
    checkInterrupt();
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLast);
  }
  return true;
}

}  // namespace fastcoll
