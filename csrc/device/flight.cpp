#include "flight.hpp"

#include "../base/error.hpp"

namespace fastcoll {

std::string Flight::describe() const {
  std::string text = concat(call, "(seq ", seq);
  if (inElements > 0 || outElements > 0) {
    text += concat(", ", dtypeName(dtype), "[", inElements, "]");
    if (outElements != inElements) text += concat(" -> [", outElements, "]");
  }
  return text + ")";
}

void Flight::issued(std::shared_ptr<c10::Event> end, bool captured) {
  std::lock_guard<std::mutex> lock(mutex_);
  end_ = std::move(end);
  captured_ = captured;
}

void Flight::blockOn(const c10::Stream& stream) const {
  std::shared_ptr<c10::Event> end;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    end = end_;
  }
  if (end != nullptr) end->block(stream);
}

void Flight::letGoHere() {
  std::shared_ptr<c10::Event> end;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    end = end_;
  }
  if (end != nullptr) end->query();
  letGo();
}

bool Flight::ended() const {
  if (passed_.load(std::memory_order_acquire)) return true;
  std::shared_ptr<c10::Event> end;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (fault_ == nullptr) {
      if (end_ == nullptr || captured_) return false;
      end = end_;
    }
  }
  if (end != nullptr && !end->query()) return false;
  passed_.store(true, std::memory_order_release);
  return true;
}

void Flight::fail(std::exception_ptr fault) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (fault_ == nullptr) fault_ = std::move(fault);
}

}  // namespace fastcoll
