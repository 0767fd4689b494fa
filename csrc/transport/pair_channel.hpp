// The one-way channel from a sender to a receiver, in the sender's arena. It exists once the sender
// has something for that receiver, and its offset stands in the sender's link to it.
//
// The sender writes records, one behind the other, into a ring of bytes; the receiver takes them in
// that order, and can take every one at once: what nobody receives yet goes to private memory. So
// nothing in the ring ever waits for what stands before it. A message begins with a kMessage
// record, numbered by its place among them. Of a large one only the beginning comes unasked; the
// rest follows in kPiece records when the receiver, having matched it to a receive, has answered
// with its number. A message that lies in the sender's arena is not copied: the record tells where,
// the receiver reads it there, and its answer is that it has done so.
//
// A ring begins small, inside the channel. Before the first message that is not small the sender
// reserves a large one and tells its place in the last record of the small one (kMove). A line that
// the receiver's core still caches is slow to write, so the large ring is longer than a core's
// second-level cache, and is always written through in full.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../base/dtype.hpp"

namespace fastcoll {

/// A record's first line; its payload follows from the next line on, or lies in `payload` if it
/// fits. All fields but `kind` are written before it and read after it.
struct alignas(64) PairRecord {
  /// kTaken and kGoodbye are words between hosts; see remote_channel.hpp.
  enum Kind : std::uint32_t { kNone = 0, kMessage, kPiece, kMove, kTaken, kGoodbye };
  static constexpr std::size_t kLine = 64;
  static constexpr std::size_t kInlineBytes = 32;

  /// Released by the sender, acquired by the receiver. It is kNone where the next record will
  /// begin: the sender clears it there before it publishes a record.
  std::atomic<std::uint32_t> kind;
  std::int32_t tag;
  std::uint32_t length;  // bytes of payload
  DType dtype;
  std::uint8_t asks;    // kMessage: the sender awaits an answer
  std::uint64_t bytes;  // kMessage: of the whole message; kMove: of the new ring
  std::uint64_t where;  // kMessage, kMove: offset in the sender's arena, or 0; kPiece: the number
  std::uint8_t payload[kInlineBytes];

  /// What a record takes of the ring.
  static std::size_t size(std::size_t length) {
    return length <= kInlineBytes ? kLine : kLine + (length + kLine - 1) / kLine * kLine;
  }
};
static_assert(sizeof(PairRecord) == PairRecord::kLine);
static_assert(sizeof(DType) == 1);

/// What a record says, read once: a broken peer may write it again.
struct RecordHead {
  PairRecord::Kind kind;
  std::int32_t tag;
  std::uint32_t length;
  DType dtype;
  bool asks;
  std::uint64_t bytes;
  std::uint64_t where;
};

struct PairChannel {
  static constexpr std::size_t kAnswers = 16;
  static constexpr std::size_t kFirstRingBytes = 32 * 1024;
  /// A message of up to so many bytes goes through any ring in one record.
  static constexpr std::size_t kSmallBytes = 2048;

  // Counts and positions only grow; release on write, acquire on read.
  // Written by the sender.
  alignas(64) std::atomic<std::uint64_t> heard;  // answers whose place may be used again
  // Written by the receiver.
  alignas(64) std::atomic<std::uint64_t> drained;  // position up to which the ring may be reused
  alignas(64) std::atomic<std::uint64_t> answered;
  std::atomic<std::uint64_t> answers[kAnswers];  // numbers of messages; relaxed, before `answered`
  // Written by the receiver: it holds so much that nobody receives that it wants no more unasked.
  // Apart from what changes with every message, so that the sender may look often.
  alignas(64) std::atomic<std::uint32_t> full;

  alignas(64) std::uint8_t ring[kFirstRingBytes];
};

}  // namespace fastcoll
