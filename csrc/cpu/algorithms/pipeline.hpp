// The pipeline of the algorithms: segment s + 1 is published before segment s is read, so the peers
// rarely wait.
#pragma once

#include "cpu/algorithms/algorithm.hpp"

namespace fastcoll {

/// For each segment s: publish(s) places, fills and publishes it; visit(s, segment) reads it and
/// consumes it; collect(s, segment) comes once the next segment was visited.
template <typename Publish, typename Visit, typename Collect>
void pipeline(std::size_t segments, Publish publish, Visit visit, Collect collect) {
  Segment ahead = publish(0), behind;
  for (std::size_t s = 0; s < segments; ++s) {
    const Segment present = ahead;
    if (s + 1 < segments) ahead = publish(s + 1);
    visit(s, present);
    if (s > 0) collect(s - 1, behind);
    behind = present;
  }
  collect(segments - 1, behind);
}

/// A pipeline of one phase. Segments have bytes(s) bytes: fill(s, memory, streaming) writes one and
/// returns the bytes written, drain(s, segment) reads one. `filled`: segment 0, if it is placed and
/// filled already.
template <typename Bytes, typename Fill, typename Drain>
void pipelineSegments(SegmentStream& stream, std::size_t segments, Bytes bytes, Fill fill,
                      Drain drain, const Segment* filled = nullptr) {
  const auto publish = [&](std::size_t s) {
    const Segment segment = s == 0 && filled != nullptr ? *filled : stream.reserve(bytes(s));
    if (s > 0 || filled == nullptr) {
      stream.fill(segment,
                  [&](std::uint8_t* memory, bool streaming) { return fill(s, memory, streaming); });
    }
    stream.publish(segment);
    return segment;
  };
  const auto visit = [&](std::size_t s, const Segment& segment) {
    drain(s, segment);
    stream.consume(segment);
  };
  pipeline(segments, publish, visit, [](std::size_t, const Segment&) {});
}

/// The cut of a message into segments of at most `limit` bytes; there is at least one.
struct Cut {
  std::size_t total;
  std::size_t step;
  std::size_t segments;

  Cut(std::size_t messageBytes, std::size_t limit)
      : total(messageBytes),
        step(std::min(messageBytes, limit)),
        segments(step == 0 ? 1 : ceilDiv(messageBytes, step)) {}
  std::size_t offset(std::size_t s) const { return s * step; }
  /// Bytes of segment s of a message that may be shorter than `total`.
  std::size_t length(std::size_t s, std::size_t messageBytes) const {
    return offset(s) >= messageBytes ? 0 : std::min(step, messageBytes - offset(s));
  }
  std::size_t length(std::size_t s) const { return length(s, total); }
};

/// For a rank that publishes its message and reads nothing: the root of broadcast, every other rank
/// in gather and reduce.
inline void publishAll(SegmentStream& stream, const Message& message, const Cut& cut) {
  Segment segment;
  for (std::size_t s = 0; s < cut.segments; ++s) {
    segment = stream.reserve(cut.length(s));
    stream.fill(segment, [&](std::uint8_t* memory, bool streaming) {
      message.read(cut.offset(s), cut.length(s), memory, streaming);
      return cut.length(s);
    });
    stream.publish(segment);
    // Before they reuse their memory, other ranks that only publish wait for this consume too.
    if (s + 1 < cut.segments) stream.consume(segment);
  }
  stream.awaitArrivals();
  stream.consume(segment);  // last of all: a peer may free its memory after it
}

/// The cut of one message per rank: every segment has a piece for each peer, `stride` bytes apart,
/// in rank order, and none for its owner.
struct Strided {
  Cut cut;
  std::size_t stride;
  std::size_t peers;

  Strided(std::size_t messageBytes, int ranks, std::size_t limit)
      : cut(messageBytes, std::max<std::size_t>(64, limit / (ranks - 1) / 64 * 64)),
        stride(ranks == 2 ? cut.step : (cut.step + 63) / 64 * 64),
        peers(ranks - 1) {}
  std::size_t bytes() const { return peers * stride; }
  /// Offset of the piece for `to` in a segment of `owner`.
  std::size_t place(int owner, int to) const { return (to > owner ? to - 1 : to) * stride; }
  /// Writes the pieces of segment s from the owner's messages, one for each rank; returns the bytes
  /// written.
  std::size_t write(std::size_t s, int owner, const std::vector<Message>& messages,
                    std::uint8_t* memory, bool streaming) const {
    const int ranks = static_cast<int>(peers) + 1;
    std::size_t written = 0;
    for (int i = 1; i < ranks; ++i) {
      const int to = (owner + i) % ranks;
      const Message& message = messages[to];
      const std::size_t length = cut.length(s, message.bytes());
      message.read(cut.offset(s), length, memory + place(owner, to), streaming);
      written += length;
    }
    return written;
  }
};

}  // namespace fastcoll
