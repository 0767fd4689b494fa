// Reuses events, because making one costs as much as recording it several times.
#pragma once

#include <c10/core/Event.h>

#include <memory>
#include <mutex>
#include <vector>

namespace fastcoll {

/// Events of one device. Any thread may take and return them. The pool outlives all its events.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(c10::DeviceType type, c10::EventFlag flag = c10::EventFlag::PYTORCH_DEFAULT)
      : type_(type), flag_(flag) {}

  /// An event that returns to the pool when its last owner releases it.
  std::shared_ptr<c10::Event> take() {
    std::unique_ptr<c10::Event> event;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        event = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (event == nullptr) event = std::make_unique<c10::Event>(type_, flag_);
    return {event.release(), [pool = shared_from_this()](c10::Event* used) {
              std::lock_guard<std::mutex> lock(pool->mutex_);
              pool->free_.emplace_back(used);
            }};
  }

 private:
  const c10::DeviceType type_;
  const c10::EventFlag flag_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<c10::Event>> free_;
};

}  // namespace fastcoll
