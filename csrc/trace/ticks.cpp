#include "trace/ticks.hpp"

#include <fstream>
#include <string>

namespace fastcoll::trace {

Ticks::Ticks() {
  std::string source;
  std::ifstream("/sys/devices/system/clocksource/clocksource0/current_clocksource") >> source;
  counter_ = source == "tsc";
  firstTicks_ = now();
  firstNanos_ = steadyNanos();
}

Ticks::Wall::Wall(const Ticks& ticks) : ticks_(ticks.now()), rate_(1) {
  const std::int64_t steady = steadyNanos();
  nanos_ = std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::system_clock::now().time_since_epoch())
               .count();
  if (ticks.counter_ && ticks_ > ticks.firstTicks_) {
    rate_ = static_cast<double>(steady - ticks.firstNanos_) /
            static_cast<double>(ticks_ - ticks.firstTicks_);
  }
}

}  // namespace fastcoll::trace
