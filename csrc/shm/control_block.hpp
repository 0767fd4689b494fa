// A rank's state of one group in shared memory, which its peers read. There is one block per
// (group, rank), in the arena of the rank's process. Peers find it in the arena's directory by the
// instance nonce.
//
// Writers: the owner writes its identity, signatures, progress, calls, splits and rings. Peers
// write `waiters` (before they sleep on a word of this block) and `abort`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/collective.hpp"
#include "base/dtype.hpp"

namespace fastcoll {

/// Whether a collective's dtype is the wire dtype of wider tensors. Partial sums between hosts are
/// then rounded to it too, unless the order of sums is fixed.
enum class Wire : std::uint8_t { None, Rounds, KeepsOrder };

/// A collective's signature, which all ranks compare, but for the digests of gradients.
struct Signature {
  std::uint64_t seq = 0;
  std::uint64_t count = 0;  // elements; each peer has its own expected count
  double factor = 1.0;      // for PREMUL_SUM
  std::int32_t root = -1;   // -1 if there is none
  Collective collective = Collective::Barrier;
  DType dtype = DType::UInt8;
  ReduceOp op = ReduceOp::None;
  Wire wire = Wire::None;  // of an AllReduce
  /// Of the collective before, with FASTCOLL_DIGEST: the digests of the result that all ranks have,
  /// and of this rank's gradients; 0 if there is none.
  std::uint64_t resultBefore = 0;
  std::uint64_t gradientsBefore = 0;
};

/// What a rank announces of a message that is not in its first segment.
struct Offer {
  std::uint64_t longest = 0;  // all_to_all: bytes of the largest message this rank sends to a peer
  std::uint64_t direct = 0;   // arena offset of its message, if peers may read it there; else 0
};

/// A rank's arrival in a collective, in one line: with `position`, for which its peers wait, they
/// fetch all that they need of a short message. They compare the hash of its signature, and read
/// the signature itself, on a line of its own, only where the hash differs. A rank writes
/// `position` when it publishes the collective's first segment, and the rest before. Two are used
/// in turn. A rank writes the one of collective k only after all peers have arrived at k-1, so
/// after all have left k-2.
struct alignas(64) ArrivalLine {
  static constexpr std::size_t kPayloadBytes = 48;
  std::atomic<std::uint64_t> position;  // the end of the first segment
  std::uint64_t hash;
  union {
    Offer offer;
    std::uint8_t payload[kPayloadBytes];  // the first segment, if it is so short
  };
};
static_assert(sizeof(ArrivalLine) == 64);

struct alignas(64) SignatureLine {
  Signature signature;
};

/// Positions in the group's stream of segments. They only grow. A futex on the low half of either
/// one, or of an arrival's, wakes the ranks that sleep on this block. Peers read this line seldom
/// in collectives of one segment, so it stays with its owner.
struct alignas(64) Progress {
  std::atomic<std::uint64_t> published;  // peers may read this rank's segments up to here
  std::atomic<std::uint64_t> consumed;   // it has read, and written, all peers' segments up to here
  std::atomic<std::uint32_t> waiters;    // ranks that sleep on a position, or are about to
  std::atomic<std::uint64_t> completed;  // sequence number of the last collective finished here
};

/// The first fault of the group, written once; every member holds a copy. Meanwhile `state` names
/// the writing rank, so its death in between is detected.
struct alignas(64) AbortRecord {
  enum State : std::uint32_t { kNone = 0, kSet = 1, kWriting = 2 };  // kWriting + rank
  std::atomic<std::uint32_t> state;
  std::uint32_t kind;  // ErrorKind
  char text[1016];
};

/// A collective on device tensors, see CallBoard.
struct alignas(64) CallLine {
  static constexpr std::size_t kWords = sizeof(Signature) / sizeof(std::uint64_t);
  std::atomic<std::uint64_t> number;  // of the line; 0 while it is written
  std::atomic<std::uint64_t> history;
  std::atomic<std::uint64_t> signature[kWords];
};
static_assert(CallLine::kWords * sizeof(std::uint64_t) == sizeof(Signature));

/// The last lines of a rank.
struct alignas(64) CallLines {
  static constexpr std::size_t kLines = 64;
  std::atomic<std::uint64_t> count;  // lines ever written
  CallLine lines[kLines];
};

/// One entry per peer.
struct PeerLink {
  std::atomic<std::uint64_t> nonce;    // the peer's instance nonce that this rank bound (the echo)
  std::atomic<std::uint64_t> channel;  // arena offset of this rank's channel to the peer, 0 = none
};

struct ControlBlock {
  std::atomic<std::uint64_t> nonce;  // a peer compares it when it binds the block
  std::uint32_t rank;
  std::uint32_t size;
  std::atomic<std::uint64_t> largeRing;  // arena offset of the large ring, 0 = none yet
  Progress progress;
  ArrivalLine arrivals[2];
  SignatureLine signatures[2];
  AbortRecord abort;
  CallLines calls;
  // Followed by: PeerLink[size], splits[2][2][size] and operands[2][size + 1] (uint64), the small
  // ring.

  static constexpr std::size_t kSmallRingBytes = 32 * 1024;
  /// The largest segment of the small ring. A group of small messages needs no other ring.
  static constexpr std::size_t kSmallSegmentBytes = 2048;

  static std::size_t linksOffset() { return sizeof(ControlBlock); }
  static std::size_t splitsOffset(int size) { return linksOffset() + sizeof(PeerLink) * size; }
  static std::size_t operandsOffset(int size) {
    return splitsOffset(size) + 4 * sizeof(std::uint64_t) * size;
  }
  static std::size_t ringOffset(int size) {
    const auto end = operandsOffset(size) + 2 * sizeof(std::uint64_t) * (size + 1);
    return (end + 63) / 64 * 64;
  }
  static std::size_t bytes(int size) { return ringOffset(size) + kSmallRingBytes; }

  PeerLink& link(int peer) { return reinterpret_cast<PeerLink*>(at(linksOffset()))[peer]; }
  /// Bytes that this rank sends to each peer, then bytes that it expects from each, in the group's
  /// collective number `collective`.
  std::uint64_t* splits(std::uint64_t collective) {
    return words(splitsOffset(static_cast<int>(size))) + (collective % 2) * 2 * size;
  }
  /// The digest of what this rank read of each rank's operand in the collective before number
  /// `collective`; of its own, less the digest of the whole operand. All ranks' sum is 0. Then
  /// 1 + that number, if there are digests.
  std::uint64_t* operands(std::uint64_t collective) {
    return words(operandsOffset(static_cast<int>(size))) + (collective % 2) * (size + 1);
  }
  std::uint8_t* smallRing() { return at(ringOffset(static_cast<int>(size))); }

 private:
  std::uint8_t* at(std::size_t offset) { return reinterpret_cast<std::uint8_t*>(this) + offset; }
  std::uint64_t* words(std::size_t offset) { return reinterpret_cast<std::uint64_t*>(at(offset)); }
};

}  // namespace fastcoll
