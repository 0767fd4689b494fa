// The pipeline that the one-phase algorithms share: while segment s is read, segment s + 1 is
// already published, so that the peers rarely wait.
#pragma once

#include "algorithm.hpp"

namespace fastcoll {

/// For each of `segments` segments from `first` on: fill(s) writes and publishes, drain(s) reads.
template <typename Fill, typename Drain>
void pipelineSegments(SegmentStream& stream, std::uint64_t first, std::size_t segments, Fill fill,
                      Drain drain) {
  fill(std::size_t{0});
  for (std::size_t s = 0; s < segments; ++s) {
    if (s + 1 < segments) fill(s + 1);
    drain(s);
    stream.consume(first + s);
  }
}

/// How a message per rank is cut: every segment holds a piece for each rank, `stride` bytes apart.
struct Strided {
  std::size_t stride;
  std::size_t segments;  // at least 1: every collective begins by arriving

  Strided(std::size_t messageBytes, int ranks, std::size_t segmentBytes) {
    const std::size_t most = segmentBytes / static_cast<std::size_t>(ranks) / 64 * 64;
    stride = std::min((messageBytes + 63) / 64 * 64, most);
    segments = stride == 0 ? 1 : ceilDiv(messageBytes, stride);
  }
  std::size_t offset(std::size_t s) const { return s * stride; }
  std::size_t length(std::size_t s, std::size_t messageBytes) const {
    const std::size_t start = offset(s);
    return start >= messageBytes ? 0 : std::min(stride, messageBytes - start);
  }
};

}  // namespace fastcoll
