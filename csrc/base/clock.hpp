// Monotonic time only: a wall clock that jumps must not end or prolong a wait.
#pragma once

#include <chrono>

namespace fastcoll {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Milliseconds = std::chrono::milliseconds;

/// start + timeout, or TimePoint::max() if the sum would overflow.
inline TimePoint deadlineAfter(TimePoint start, Milliseconds timeout) {
  const auto room = std::chrono::duration_cast<Milliseconds>(TimePoint::max() - start);
  return timeout >= room ? TimePoint::max() : start + timeout;
}

}  // namespace fastcoll
