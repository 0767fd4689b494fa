#include "footprint.hpp"

#include <algorithm>
#include <utility>

namespace recording {

Footprint::Footprint(uintptr_t begin, uintptr_t end) {
  if (begin < end) runs_.push_back({begin, end});
}

Footprint Footprint::strided(uintptr_t begin, const std::vector<int64_t>& sizes,
                             const std::vector<int64_t>& byte_strides, int64_t item_bytes) {
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride, size
  int64_t last = item_bytes;                            // bytes from the first to the last one
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return {};
    if (sizes[d] == 1 || byte_strides[d] == 0) continue;
    dimensions.emplace_back(byte_strides[d], sizes[d]);
    last += byte_strides[d] * (sizes[d] - 1);
  }
  std::sort(dimensions.begin(), dimensions.end());

  int64_t run = item_bytes;
  auto outer = dimensions.begin();
  while (outer != dimensions.end() && outer->first == run) {
    run *= outer->second;
    ++outer;
  }
  int64_t count = 1;
  for (auto d = outer; d != dimensions.end() && count <= kMostRuns; ++d) count *= d->second;
  if (count > kMostRuns) return {begin, begin + static_cast<uintptr_t>(last)};

  std::vector<uintptr_t> starts{begin};
  for (auto d = outer; d != dimensions.end(); ++d) {
    const size_t before = starts.size();
    for (int64_t i = 1; i < d->second; ++i) {
      for (size_t s = 0; s < before; ++s) {
        starts.push_back(starts[s] + static_cast<uintptr_t>(i * d->first));
      }
    }
  }
  std::sort(starts.begin(), starts.end());
  Footprint footprint;
  for (const uintptr_t start : starts) {
    const uintptr_t end = start + static_cast<uintptr_t>(run);
    if (!footprint.runs_.empty() && start <= footprint.runs_.back().end) {
      footprint.runs_.back().end = std::max(footprint.runs_.back().end, end);
    } else {
      footprint.runs_.push_back({start, end});
    }
  }
  return footprint;
}

Range Footprint::common(const Footprint& other) const {
  auto a = runs_.begin();
  auto b = other.runs_.begin();
  while (a != runs_.end() && b != other.runs_.end()) {
    const Range both{std::max(a->begin, b->begin), std::min(a->end, b->end)};
    if (both.begin < both.end) return both;
    a->end < b->end ? ++a : ++b;
  }
  return {0, 0};
}

bool Footprint::overlaps(const Footprint& other) const {
  const Range both = common(other);
  return both.begin < both.end;
}

bool Footprint::covers(const Footprint& other) const {
  auto mine = runs_.begin();
  for (const Range& run : other.runs_) {
    while (mine != runs_.end() && mine->end < run.end) ++mine;
    if (mine == runs_.end() || mine->begin > run.begin) return false;
  }
  return true;
}

}  // namespace recording
