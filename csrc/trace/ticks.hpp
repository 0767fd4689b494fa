// The clock of the records. Where the kernel itself trusts the processor's counter (the same rate
// on all cores, whatever their frequency and sleep), it is read directly: 10 ns instead of 25,
// twice a call. What a tick is in nanoseconds is found when somebody wants to know.
#pragma once

#include <chrono>
#include <cstdint>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "../base/clock.hpp"

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

  /// Ticks of now and before, in nanoseconds since 1970.
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
