#include "ring_stores.hpp"

#include <algorithm>

namespace fastcoll {

double RingStores::Costs::median() const {
  std::array<double, kKept> sorted = last;
  const auto end = sorted.begin() + std::min(seen, kKept);
  const auto middle = sorted.begin() + (end - sorted.begin()) / 2;
  std::nth_element(sorted.begin(), middle, end);
  return *middle;
}

bool RingStores::streaming(std::size_t bytes) const {
  if (choice_ != StoresChoice::Auto) return choice_ == StoresChoice::Streaming;
  if (bytes < kLeastBytes || fresh_ > 0) return false;
  return now_ != (tries_ > 0);
}

void RingStores::took(std::size_t bytes, double nanoseconds, bool streaming) {
  if (choice_ != StoresChoice::Auto || bytes < kLeastBytes) return;
  if (fresh_ > 0) {
    fresh_ -= std::min(fresh_, bytes);
    return;
  }
  const double cost = nanoseconds / static_cast<double>(bytes);
  const bool tried = streaming != now_;
  costs(streaming).add(cost);
  inARow_ = tried ? 0 : inARow_ + 1;
  if (tried && tries_ > 0) --tries_;
  choose(cost, tried);
}

void RingStores::choose(double latest, bool tried) {
  if (!plain_.enough() || !streaming_.enough()) return;
  const double plain = plain_.median();
  const double streaming = streaming_.median();
  const bool next = plain >= (now_ ? kEnds : kBegins) * streaming;
  if (next != now_) {
    now_ = next;
    tries_ = inARow_ = 0;
    plainThen_ = plain;
    return;
  }
  if (tried) {
    // The median follows only after more of the same: they are had at once.
    const bool speaksForOther = now_ ? latest < kEnds * streaming : plain >= kBegins * latest;
    if (tries_ == 0 && speaksForOther) tries_ = 1;
    plainThen_ = plain;
    return;
  }
  if (tries_ > 0) return;
  plainThen_ = plainThen_ == 0 ? plain : std::min(plainThen_, plain);
  const bool dearer = !now_ && plain >= kEnds * plainThen_;
  if (dearer) {
    tries_ = Costs::kEnough;  // what streaming cost before may have come from another memory
  } else if (inARow_ >= (now_ ? kStreamingInARow : kPlainInARow)) {
    tries_ = 1;
  }
}

}  // namespace fastcoll
