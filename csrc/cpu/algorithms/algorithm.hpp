// Algorithms order transfers. Each is one function in one file: it takes a request and a
// transport's stream of segments, and runs to the end or throws.
//
// Words: a message is cut into segments, a segment into one piece per rank. n = ranks, B = bytes of
// the message.
#pragma once

#include <cstdint>
#include <vector>

#include "base/clock.hpp"
#include "cpu/algorithms/tuning.hpp"
#include "reduce/reduce.hpp"
#include "shm/control_block.hpp"
#include "shm/message.hpp"
#include "shm/segment_stream.hpp"

namespace fastcoll {

/// A collective as the engine passes it on: validated, in contiguous spans, without torch.
///
///   collective       in                          out
///   AllReduce        [message]                   [message]          (may be the same memory)
///   Broadcast        root: [message]             others: [message]
///   Reduce           [message]                   root: [message]
///   AllGather        [message]                   one message per rank
///   Gather           [message]                   root: one message per rank
///   Scatter          root: one per rank          [message]
///   ReduceScatter    one message per rank        [message]
///   AllToAll         one message per rank        one message per rank
///   Barrier          -                           -
struct Request : Signature {
  ReduceFn kernel = nullptr;  // of dtype and op, if they were looked up when the call was checked
  /// Address of the factor if it is on a device; only that device's engine can read it.
  const void* factorOnDevice = nullptr;
  std::vector<Message> in;
  std::vector<Message> out;
  /// The parts of all ranks are contiguous. The form of the call implies it, so it holds on every
  /// rank.
  bool contiguousParts = false;
  /// ReduceScatter: `dtype` has 16 bits and `out` is float32, so the sum is not rounded to 16 bits.
  bool outputFloat32 = false;
  /// AllReduce, ReduceScatter: where to add the squares of this rank's share of the result, or
  /// nullptr. The shares of all ranks together are the result.
  double* squares = nullptr;
  /// A sum inside a host: where to add the digests of the operands that this rank reads, by the
  /// places of their ranks, or nullptr. All ranks together read each operand once.
  std::uint64_t* operandDigests = nullptr;
  /// Elements that each peer must announce, if they differ from `count`; else empty.
  std::vector<std::uint64_t> expectedCount;

  Milliseconds timeout{};
  std::optional<TimePoint> deadline;  // see SegmentStream::begin()

  const Signature& signature() const { return *this; }
};

/// Begins the request's collective. `direct`: see Offer::direct.
inline void begin(SegmentStream& stream, const Request& request, std::uint64_t direct = 0) {
  stream.begin(request, request.expectedCount, {0, direct}, nullptr, request.deadline,
               request.timeout);
}

void oneShotAllReduce(SegmentStream& stream, const Request& request);
void segmentedAllReduce(SegmentStream& stream, const Request& request, const TuningTable& tuning);
/// Begins the all-reduce, and runs it if the messages of all ranks are in shared memory; false on
/// all ranks otherwise.
bool directAllReduce(SegmentStream& stream, const Request& request, const TuningTable& tuning);
void allGather(SegmentStream& stream, const Request& request, const TuningTable& tuning);
void reduceScatter(SegmentStream& stream, const Request& request, const TuningTable& tuning);
void broadcast(SegmentStream& stream, const Request& request, const TuningTable& tuning);
void reduce(SegmentStream& stream, const Request& request, const TuningTable& tuning);
void gather(SegmentStream& stream, const Request& request, const TuningTable& tuning);
void scatter(SegmentStream& stream, const Request& request, const TuningTable& tuning);
void allToAll(SegmentStream& stream, const Request& request, const TuningTable& tuning);
void barrier(SegmentStream& stream, const Request& request);

/// A group of one rank, which needs no stream.
void runSingleRank(const Request& request);

/// Runs the collective with the algorithm that the selector chooses.
void runCollective(SegmentStream& stream, const Request& request, const TuningTable& tuning);

/// The part of `total` elements that belongs to `index` of `parts`. Starts are multiples of 64
/// elements, so every piece but the last consists of whole cache lines.
struct Piece {
  std::size_t start;
  std::size_t count;
};
inline Piece pieceOf(std::size_t total, int parts, int index) {
  const std::size_t each = ((total + parts - 1) / parts + 63) / 64 * 64;
  const std::size_t start = std::min(total, each * index);
  return {start, std::min(total, start + each) - start};
}

/// Most bytes of a segment for a message of this size; at least one cache line.
inline std::size_t segmentLimit(const SegmentStream& stream, const TuningTable& tuning,
                                std::size_t messageBytes) {
  const std::size_t wanted =
      messageBytes > tuning.longBytes ? tuning.longSegmentBytes : tuning.segmentBytes;
  // See SegmentStream::ringBytes().
  return std::max<std::size_t>(64, std::min(wanted, stream.ringBytes() / 4) / 64 * 64);
}

inline std::size_t ceilDiv(std::size_t a, std::size_t b) {
  return (a + b - 1) / b;
}

}  // namespace fastcoll
