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

bool Flight::ended() const {
  if (passed_.load(std::memory_order_acquire)) return true;
  if (captured) return false;
  if (!end->query() && fault() == nullptr) return false;
  passed_.store(true, std::memory_order_release);
  return true;
}

void Flight::fail(std::exception_ptr fault) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (fault_ == nullptr) fault_ = std::move(fault);
}

}  // namespace fastcoll
