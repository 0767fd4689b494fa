// The clock of the records. If the kernel itself uses the processor's counter, it is read directly:
// 10 ns instead of 25, twice a call. Such a counter has the same rate on all cores, at any
// frequency and in sleep. A tick's length in nanoseconds is computed on demand.
#pragma once

#include <chrono>
#include <cstdint>
#include <fstream>
#include <string>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "base/clock.hpp"

namespace fastcoll::trace {

template <typename Time>
std::int64_t nanosOf(Time time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}
inline std::int64_t steadyNanos() {
  return nanosOf(Clock::now());
}

class Ticks {
 public:
  Ticks() {
    std::string source;
    std::ifstream("/sys/devices/system/clocksource/clocksource0/current_clocksource") >> source;
    counter_ = source == "tsc";
    firstTicks_ = now();
    firstNanos_ = steadyNanos();
  }

  std::int64_t now() const {
#if defined(__x86_64__)
    if (counter_) return static_cast<std::int64_t>(__rdtsc());
#endif
    return steadyNanos();
  }

  /// Converts ticks, of now or earlier, to nanoseconds since 1970.
  class Wall {
   public:
    explicit Wall(const Ticks& ticks)
        : ticks_(ticks.now()), nanos_(nanosOf(std::chrono::system_clock::now())) {
      if (!ticks.counter_ || ticks_ <= ticks.firstTicks_) return;
      rate_ = static_cast<double>(steadyNanos() - ticks.firstNanos_) /
              static_cast<double>(ticks_ - ticks.firstTicks_);
    }
    std::int64_t operator()(std::int64_t ticks) const {
      return nanos_ + static_cast<std::int64_t>(static_cast<double>(ticks - ticks_) * rate_);
    }
    double milliseconds(std::int64_t ticks) const {
      return static_cast<double>(ticks) * rate_ * 1e-6;
    }

   private:
    std::int64_t ticks_;
    std::int64_t nanos_;
    double rate_ = 1;
  };

 private:
  bool counter_ = false;
  std::int64_t firstTicks_;
  std::int64_t firstNanos_;
};

}  // namespace fastcoll::trace
