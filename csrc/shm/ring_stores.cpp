#include "shm/ring_stores.hpp"

#include <algorithm>

namespace fastcoll {

double StoresChooser::Costs::median() const {
  std::array<double, kKept> sorted = last;
  const auto end = sorted.begin() + static_cast<std::ptrdiff_t>(std::min(seen, kKept));
  const auto middle = sorted.begin() + (end - sorted.begin()) / 2;
  std::nth_element(sorted.begin(), middle, end);
  return *middle;
}

void StoresChooser::wrote(std::size_t bytes, double nanoseconds, bool streaming) {
  if (bytes < kLeastBytes) return;
  const bool counts = timed();
  at_ += bytes;
  if (counts) {
    untimed_ = 0;
    (streaming ? streaming_ : plain_).add(nanoseconds / static_cast<double>(bytes));
    if (tries_ == 1) {
      decide();
    } else if (tries_ > 1) {
      --tries_;
    } else if (!now_ && plain_.median() >= kRises * plainThen_) {
      beginTry();
    }
  } else {
    ++untimed_;
  }
  if (tries_ == 0 && at_ >= kCycle * ringBytes_) beginTry();
}

void StoresChooser::decide() {
  const double enough = (now_ ? kStays : 1.0) * begins_ * streaming_.median();
  plainThen_ = plain_.median();
  now_ = plainThen_ >= enough;
  tries_ = 0;
  at_ = 0;
}

void StoresChooser::beginTry() {
  at_ = 0;
  tries_ = kTries;
}

}  // namespace fastcoll
