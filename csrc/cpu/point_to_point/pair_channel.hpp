// The one-way channel from a sender to a receiver, in the sender's arena. The sender creates it for
// its first message to that receiver, and stores its offset in its PeerLink.
//
// The sender writes records one behind another into a ring of bytes; the receiver takes them in
// that order. It never needs more than a moment for a record: a message without a matching receive
// stays in the ring for 200 us at most, because its receive is often about to be posted, and then
// goes to private memory.
//
// A message begins with a kMessage record; its number is its place among these records. Only the
// beginning of a large message is eager. The receiver matches it to a receive and answers with its
// number; then the rest follows in kPiece records. A long contiguous message in the sender's arena
// is not copied. Its record gives the offset, the receiver reads the message there, and its answer
// confirms that.
//
// A ring begins small, inside the channel. Before the first message that is not small, the sender
// reserves a large ring. The small ring's last record gives the offset (kMove). A line that the
// receiver's core still caches is slow to write. So the large ring is longer than a core's
// second-level cache, except in large groups, and the sender always cycles through all of it. With
// it, the sender reserves a few cells, which the pieces of both directions use in turn. Rings
// shorter than 512 KiB have none (pair_cells.hpp).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"

namespace fastcoll {

/// A record's fields.
struct RecordHead {
  /// kCredit and kClose are used between hosts only; see remote_channel.hpp.
  enum Kind : std::uint32_t { kNone = 0, kMessage, kPiece, kMove, kCredit, kClose } kind = kNone;
  std::int32_t tag = 0;
  std::uint32_t length = 0;  // bytes of payload
  DType dtype{};
  std::uint8_t asks = 0;    // kMessage: the sender awaits an answer
  std::uint8_t cell = 0;    // number of the cell with the payload, or 0
  std::uint64_t bytes = 0;  // kMessage: of the whole message; kMove: of the new ring
  std::uint64_t where = 0;  // kMessage, kMove: offset in the sender's arena, or 0; kPiece: a number
};

/// A record's first line. Its payload is in a cell, or in `payload` if it fits, else it begins in
/// the next line. All other fields are written before `kind` and read after it.
struct alignas(64) PairRecord {
  static constexpr std::size_t kLine = 64;
  static constexpr std::size_t kInlineBytes = 32;

  /// Released by the sender, acquired by the receiver. It is kNone at the place of the next record:
  /// the sender clears it there before it publishes a record.
  std::atomic<std::uint32_t> kind;
  std::uint8_t fields[sizeof(RecordHead) - sizeof kind];  // of a RecordHead, after its kind
  std::uint8_t payload[kInlineBytes];

  /// Bytes of the ring for a record with `length` bytes of payload.
  static std::size_t size(std::size_t length) {
    return length <= kInlineBytes ? kLine : kLine + (length + kLine - 1) / kLine * kLine;
  }
  static std::size_t size(const RecordHead& head) { return size(head.cell == 0 ? head.length : 0); }
};
static_assert(sizeof(PairRecord) == PairRecord::kLine);
static_assert(sizeof(DType) == 1);

struct PairChannel {
  static constexpr std::size_t kAnswers = 16;
  static constexpr std::size_t kFirstRingBytes = 32 * 1024;
  /// A message of at most this size goes through any ring in one record.
  static constexpr std::size_t kSmallBytes = 2048;

  // Counts and positions only grow; release on write, acquire on read.
  // Written by the sender.
  alignas(64) std::atomic<std::uint64_t> answersRead;  // their slots may be reused
  std::atomic<std::uint64_t> cells;  // their offset, or 0; relaxed, because kMove publishes it
  // Written by the receiver.
  alignas(64) std::atomic<std::uint64_t> drained;  // position up to which the ring may be reused
  alignas(64) std::atomic<std::uint64_t> answered;
  std::atomic<std::uint64_t> answers[kAnswers];  // message numbers; relaxed, before `answered`
  // Written by the receiver: it holds so many unmatched bytes that it wants no more eager ones. It
  // has its own line, apart from the words that every message changes, because the sender polls it.
  alignas(64) std::atomic<std::uint32_t> full;

  alignas(64) std::uint8_t ring[kFirstRingBytes];
};

}  // namespace fastcoll
