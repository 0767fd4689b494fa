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
  if (tries_ == 0 && ++untimed_ < kTimed) return false;
  untimed_ = 0;
  return true;
}

void StoresChooser::took(double cost, bool streaming) {
  const bool tried = streaming != now_;
  costs(streaming).add(cost);
  inARow_ = tried ? 0 : inARow_ + 1;
  if (tried && tries_ > 0) --tries_;
  if (tries_ > 0 || !plain_.enough() || !streaming_.enough()) return;
  if (wantsOther()) {
    // Old costs of the other stores may be those of another message, so try these stores first.
    if (inARow_ < kFirstRest) {
      turn();
    } else {
      tries_ = Costs::kEnough;
    }
  } else if (tried) {
    weigh(cost);
  } else if (inARow_ >= rest_) {
    tries_ = 1;
  } else if (!now_ && plain_.median() >= kRises * plainThen_) {
    tries_ = Costs::kEnough;
  }
}

bool StoresChooser::wantsOther() const {
  const bool dear = plain_.median() >= (now_ ? kStays : 1.0) * begins_ * streaming_.median();
  return dear != now_;
}

void StoresChooser::turn() {
  now_ = !now_;
  inARow_ = 0;
  rest_ = kFirstRest;
  plainThen_ = plain_.median();
}

void StoresChooser::weigh(double latest) {
  // A median moves only after more such costs, so try the next segment at once.
  const bool promising =
      now_ ? latest < kStays * begins_ * streaming_.median() : plain_.median() >= begins_ * latest;
  if (promising) {
    tries_ = 1;
    return;
  }
  rest_ = std::min(2 * rest_, kLongestRest);
  plainThen_ = plain_.median();
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
