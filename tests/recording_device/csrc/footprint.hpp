// The bytes that one access touches.
#pragma once

#include <cstdint>
#include <vector>

namespace recording {

struct Range {
  uintptr_t begin;
  uintptr_t end;
};

class Footprint {
 public:
  Footprint() = default;
  Footprint(uintptr_t begin, uintptr_t end);

  // A strided tensor's exact elements, so columns of one matrix do not overlap. With more than
  // kMostRuns separate runs: everything from the first byte to the last.
  static Footprint strided(uintptr_t begin, const std::vector<int64_t>& sizes,
                           const std::vector<int64_t>& byte_strides, int64_t item_bytes);

  bool empty() const { return runs_.empty(); }
  bool overlaps(const Footprint& other) const;
  bool covers(const Footprint& other) const;
  Range bounds() const { return {runs_.front().begin, runs_.back().end}; }
  // The first bytes that both touch; {0, 0} if they do not overlap.
  Range common(const Footprint& other) const;

 private:
  static constexpr int64_t kMostRuns = 1 << 14;

  std::vector<Range> runs_;  // sorted, with gaps between them
};

}  // namespace recording
