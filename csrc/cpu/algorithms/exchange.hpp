// Two ranks exchange their messages in place: half of a rank's message goes through its own ring,
// the other half through its peer's.
//
// Phases, for each segment s: both ranks publish the first half of their messages; each reads the
//         peer's first half from the peer's segment, and writes the second half of its own message
//         over it; once the peer has consumed the segment, its owner reads the peer's second half
//         from it.
// Order:  publish 0 | publish s+1, first half of s, second half of s-1 | ...
// Steps: 2 per segment. Bytes read per rank: half of what it receives, from its peer's ring, where
//         it writes half of what it sends; the other half from its own ring.
//
// A line of the ring goes to the peer and returns, and carries bytes both ways. Between cores that
// share a cache, a line that returns unwritten is as fast to write again. Between other cores it is
// several times slower, so ranks on such cores use the simpler pipeline. The kernel's report of
// caches decides, because both ranks must choose alike. Messages too large for a cache are bound by
// memory, and use the pipeline too.
#pragma once

#include <algorithm>

#include "cpu/algorithms/pipeline.hpp"

namespace fastcoll {

class Exchange {
 public:
  /// Whether the ranks exchange messages of at most `longest` bytes so; equal on all ranks.
  static bool serves(const SegmentStream& stream, const TuningTable& tuning, std::size_t longest) {
    return stream.size() == 2 && stream.sharedCache() && longest >= kLeastBytes &&
           longest <= tuning.longBytes;
  }

  /// `in`: the message for the peer. `expected`: bytes that come from the peer. `longest`: at least
  /// the bytes of either message, equal on both ranks.
  Exchange(SegmentStream& stream, const TuningTable& tuning, const Message& in,
           std::size_t expected, std::size_t longest)
      : stream_(stream),
        in_(in),
        expected_(expected),
        cut_(longest, segmentLimit(stream, tuning, longest)) {}

  /// Places segment s, the next one, and fills it. It waits for a position published long before.
  Segment fill(std::size_t s) {
    const Segment segment = stream_.reserve(half(cut_.step), true);
    const auto write = [&](std::uint8_t* memory, bool streaming) {
      const std::size_t length = half(cut_.length(s, in_.bytes()));
      in_.read(cut_.offset(s), length, memory, streaming);
      return length;
    };
    stream_.fill(segment, write, true);
    return segment;
  }

  /// Calls take(offset, bytes, memory) for each part received; `memory` is valid during the call.
  /// `filled`: segment 0, if it has been filled already. `atOnce`: several threads may call copies
  /// of take.
  template <typename Take>
  void run(Take take, bool atOnce, const Segment* filled = nullptr) {
    const auto publish = [&](std::size_t s) {
      const Segment segment = s == 0 && filled != nullptr ? *filled : fill(s);
      stream_.publish(segment);
      return segment;
    };
    const auto visit = [&](std::size_t s, const Segment& segment) {
      swap(s, segment, take, atOnce);
      stream_.consume(segment);
    };
    pipeline(cut_.segments, publish, visit,
             [&](std::size_t s, const Segment& segment) { takeReturned(s, segment, take); });
  }

 private:
  /// Below this size the second step costs more than it saves.
  static constexpr std::size_t kLeastBytes = 8 * 1024;
  /// A block is overwritten while it is in the first-level cache. 8 KiB minus one line avoids 4K
  /// aliasing: otherwise a block's first loads would wait for the previous block's stores. Their
  /// addresses would differ in the page number only.
  static constexpr std::size_t kBlock = 8192 - 64;

  /// Bytes that go through the sender's ring: all, if at most one line; else whole lines, and at
  /// least as many as the rest.
  static std::size_t half(std::size_t length) {
    return std::min(length, (length + 127) / 128 * 64);
  }
  /// Bytes of `length` from `at` on, at most `most`.
  static std::size_t within(std::size_t length, std::size_t at, std::size_t most) {
    return at >= length ? 0 : std::min(most, length - at);
  }

  template <typename Take>
  void swap(std::size_t s, const Segment& segment, const Take& take, bool atOnce) {
    const std::size_t incoming = half(cut_.length(s, expected_));
    const std::size_t outgoing = cut_.length(s, in_.bytes());
    const std::size_t published = half(outgoing);
    std::uint8_t* memory = stream_.await(1 - stream_.rank(), segment);
    const auto chunk = [&](std::size_t begin, std::size_t end) {
      Take own = take;
      for (std::size_t at = begin; at < end; at += kBlock) {
        const std::size_t most = std::min(kBlock, end - at);
        const std::size_t bytes = within(incoming, at, most);
        if (bytes > 0) own(cut_.offset(s) + at, bytes, memory + at);
        in_.read(cut_.offset(s) + published + at, within(outgoing - published, at, most),
                 memory + at);
      }
    };
    atOnce ? Helpers::inChunks(half(cut_.step), chunk) : chunk(0, half(cut_.step));
  }

  template <typename Take>
  void takeReturned(std::size_t s, const Segment& segment, Take& take) {
    const std::uint8_t* memory = stream_.awaitConsumed(segment);
    const std::size_t incoming = cut_.length(s, expected_);
    const std::size_t first = half(incoming);
    if (incoming > first) take(cut_.offset(s) + first, incoming - first, memory);
  }

  SegmentStream& stream_;
  const Message& in_;
  const std::size_t expected_;
  const Cut cut_;
};

}  // namespace fastcoll
