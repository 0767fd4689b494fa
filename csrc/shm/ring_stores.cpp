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

bool StoresChooser::timed(std::size_t bytes) {
  at_ += bytes;
  if (at_ <= ringBytes_) return false;
  if (tries_ > 0) return true;
  if (at_ < kCycle * ringBytes_) return ++untimed_ >= kTimed;
  beginTry();
  return false;
}

void StoresChooser::took(double cost, bool streaming) {
  (streaming ? streaming_ : plain_).add(cost);
  untimed_ = 0;
  if (tries_ > 0) {
    if (--tries_ > 0) return;
    at_ = 0;
    const double enough = (now_ ? kStays : 1.0) * begins_ * streaming_.median();
    plainThen_ = plain_.median();
    now_ = plainThen_ >= enough;
  } else if (!now_ && plain_.median() >= kRises * plainThen_) {
    beginTry();
  }
}

void StoresChooser::beginTry() {
  at_ = 0;
  tries_ = kTries;
}

bool RingStores::streaming(std::size_t bytes) const {
  if (choice_ != StoresChoice::Auto) return choice_ == StoresChoice::Streaming;
  return learns(bytes) && chooser(bytes).streaming();
}

bool RingStores::timed(std::size_t bytes) {
  return learns(bytes) && chooser(bytes).timed(bytes);
}

void RingStores::took(std::size_t bytes, std::size_t written, double nanoseconds, bool streaming) {
  if (!learns(bytes) || written < kLeastBytes) return;
  chooser(bytes).took(nanoseconds / static_cast<double>(written), streaming);
}

}  // namespace fastcoll
