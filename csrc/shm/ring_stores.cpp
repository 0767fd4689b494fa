#include "shm/ring_stores.hpp"

#include <algorithm>

namespace fastcoll {

double StoresChooser::Costs::median() const {
  std::array<double, kKept> sorted = last;
  const auto end = sorted.begin() + std::min(seen, kKept);
  const auto middle = sorted.begin() + (end - sorted.begin()) / 2;
  std::nth_element(sorted.begin(), middle, end);
  return *middle;
}

bool StoresChooser::timed() {
  if (at_ < kTries || at_ % kTimed == 0) return true;
  at_ = (at_ + 1) % kCycle;
  return false;
}

void StoresChooser::took(double cost, bool streaming) {
  (streaming ? streaming_ : plain_).add(cost);
  at_ = (at_ + 1) % kCycle;
  if (at_ == kTries) {
    const double enough = (now_ ? kStays : 1.0) * begins_ * streaming_.median();
    plainThen_ = plain_.median();
    now_ = plainThen_ >= enough;
  } else if (at_ > kTries && !now_ && plain_.median() >= kRises * plainThen_) {
    at_ = 0;
  }
}

bool RingStores::streaming(std::size_t bytes) const {
  if (choice_ != StoresChoice::Auto) return choice_ == StoresChoice::Streaming;
  return learns(bytes) && fresh_ == 0 && chooser(bytes).streaming();
}

bool RingStores::timed(std::size_t bytes) {
  return learns(bytes) && (fresh_ > 0 || chooser(bytes).timed());
}

void RingStores::took(std::size_t bytes, std::size_t written, double nanoseconds, bool streaming) {
  if (!learns(bytes)) return;
  if (fresh_ > 0) {
    fresh_ -= std::min(fresh_, bytes);
  } else if (written >= kLeastBytes) {
    chooser(bytes).took(nanoseconds / static_cast<double>(written), streaming);
  }
}

}  // namespace fastcoll
