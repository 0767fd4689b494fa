// The records of calls on one stream, used again when their calls have ended: then a call makes no
// event and allocates nothing.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "cuda/in_flight.hpp"

namespace fastcoll {

/// From one thread at a time.
class FlightPool {
 public:
  FlightPool() = default;
  FlightPool(const FlightPool&) = delete;
  FlightPool& operator=(const FlightPool&) = delete;
  ~FlightPool() {
    while (first_ != nullptr) pop();  // a chain of destructors would need a deep stack
  }

  /// A record that only the pool refers to. It is not used again before all others let go of it.
  InFlightRef take(c10::DeviceType type, bool timed) {
    InFlightRef taken;
    // Calls on a stream end in order, so all are under way if the first is.
    while (first_ != nullptr && taken == nullptr) {
      const bool unused = first_.use_count() == 1;
      if (!unused && !first_->wasSeen()) break;
      InFlightRef ended = pop();  // if a work still keeps it, the work frees it
      if (unused && ended->timed == timed) taken = std::move(ended);
    }
    std::atomic_thread_fence(std::memory_order_acquire);  // use_count() is relaxed
    if (taken == nullptr) taken = std::make_shared<InFlightCall>(type, timed);
    (first_ == nullptr ? first_ : last_->next) = taken;
    last_ = taken.get();
    return taken;
  }

 private:
  InFlightRef pop() {
    InFlightRef next = std::move(first_->next);
    return std::exchange(first_, std::move(next));
  }

  InFlightRef first_;  // the oldest; each refers to the next
  InFlightCall* last_ = nullptr;
};

}  // namespace fastcoll
