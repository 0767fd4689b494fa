// The clock of the records. If the kernel itself uses the processor's counter, it is read directly:
// 10 ns instead of 25, twice a call. Such a counter has the same rate on all cores, at any
// frequency and in sleep. A tick's length in nanoseconds is computed on demand.
#pragma once

#include <chrono>
#include <cstdint>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "base/clock.hpp"

namespace fastcoll::trace {

inline std::int64_t steadyNanos() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

class Ticks {
 public:
  Ticks();

  std::int64_t now() const {
#if defined(__x86_64__)
    if (counter_) return static_cast<std::int64_t>(__rdtsc());
#endif
    return steadyNanos();
  }

  /// Converts ticks, of now or earlier, to nanoseconds since 1970.
  class Wall {
   public:
    explicit Wall(const Ticks& ticks);
    std::int64_t operator()(std::int64_t ticks) const {
      return nanos_ + static_cast<std::int64_t>(static_cast<double>(ticks - ticks_) * rate_);
    }
    double milliseconds(std::int64_t ticks) const {
      return static_cast<double>(ticks) * rate_ * 1e-6;
    }

   private:
    std::int64_t ticks_;
    std::int64_t nanos_;
    double rate_;
  };

 private:
  bool counter_ = false;
  std::int64_t firstTicks_;
  std::int64_t firstNanos_;
};

}  // namespace fastcoll::trace
