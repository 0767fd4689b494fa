// The stream of segments by which the ranks of a group exchange a collective's bytes.
//
// Every rank owns a ring of memory in its arena. It writes segment after segment into it; all peers
// read the segments in place. A segment has a position in the stream, in bytes since the group
// began. It lies in the ring at that position modulo the ring's length. All ranks place the same
// segments for a collective. So a position names the same segment on every rank, and no barrier is
// needed between collectives. Two positions per rank order everything:
//
//   owner:   wait until all peers consumed up to end - ring;  write;  published = end
//   reader:  wait until peer.published >= end;  read;                 consumed = end
//
// Before a reader consumes a segment, it may also write the parts that are meant for it alone. The
// owner reads these parts once all peers have consumed the segment. So a result returns in the
// lines that brought its operands.
//
// Release/acquire on the two positions orders the plain writes and reads of the ring. Only a
// segment that ends a whole ring later overwrites a segment. `consumed` is always the end of a
// segment, so waiting for end - ring frees every segment that the new one overlaps.
//
// Segments of any size cycle through the whole ring, which is longer than a core's second-level
// cache. To write a line that a peer still caches is several times slower than to write one that
// has left its cache. A collective with segments of at most kSmallSegmentBytes uses a small ring in
// the control block, with the same positions. So a group of such collectives needs no other memory.
// A first segment of at most ArrivalLine::kPayloadBytes has its position too, but travels in the
// line of the rank's arrival.
// Collectives in which readers write always use the large ring.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shm/group_memory.hpp"
#include "shm/ring_stores.hpp"
#include "shm/signature.hpp"

namespace fastcoll {

/// A place in the stream, the same on all ranks.
struct Segment {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  bool large = false;   // it lies in the large ring
  bool inLine = false;  // it lies in the line of the rank's arrival
};

class SegmentStream {
 public:
  /// `members`: the group's ranks that share this stream, this one included; their blocks are
  /// bound. All functions below identify a peer by its place in `members`. `sharedCache`: whether
  /// their cores share one, so that lines between two of them are cheap; equal on all.
  SegmentStream(GroupMemory& memory, std::vector<int> members, bool sharedCache,
                std::size_t ringBytes, int spinMicros, StoresChoice stores);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  bool sharedCache() const { return sharedCache_; }
  /// The places of the other members, beginning with the next one, so that not all ranks read from
  /// one at once.
  const std::vector<int>& others() const { return others_; }
  /// The rank in the group of the member at this place.
  int memberOf(int place) const { return members_[place]; }
  /// Bytes of the large ring. A segment takes a quarter at most: three are in flight at once
  /// (behind, present, ahead), and the end of the ring may be too short for one.
  std::size_t ringBytes() const { return ringBytes_; }

  /// Extends the deadline while the missing peer may itself wait for another host, because that
  /// peer can name the cause. Adds 2 * grace if all peers have arrived. Adds 3 * grace if those
  /// that have not are still in a collective that this rank has completed. Adds nothing if a peer
  /// is stopped.
  void setGrace(Milliseconds grace) { grace_ = grace; }
  /// Starts a collective: announces its signature and an offer. `expectedCount[peer]` is the number
  /// of elements that each peer must announce; empty: as many as this rank. `splits` are the bytes
  /// sent to each peer and expected from each (all_to_all), or nullptr. Without a deadline the
  /// timeout begins with the first wait that does not end at once. So a small call reads no clock
  /// for it.
  void begin(const Signature& signature, const std::vector<std::uint64_t>& expectedCount,
             const Offer& offer, const std::uint64_t* splits, std::optional<TimePoint> deadline,
             Milliseconds timeout);
  /// Announces the digests of the operands that this rank read in the collective before, by place;
  /// call it before begin(). `own`: the digest that its own operand had. The collective fails if
  /// the ranks together read other operands than they had.
  void announceOperands(const std::vector<std::uint64_t>& read, std::uint64_t own);
  /// The next `bytes` of the stream, at least a cache line. All ranks must place the same. `large`:
  /// in the large ring, whatever the size. Readers may write only there, because only that ring's
  /// memory is kept for late writers.
  Segment reserve(std::size_t bytes, bool large = false);
  /// Undoes the placing of all segments after `last` in the present collective. This rank has
  /// published none of them, but may have written them.
  void releaseAfter(const Segment& last) {
    reserved_ = last.end;
    large_ = last.large;
  }
  /// Ends the collective. This rank must have published and consumed all that it placed.
  void end();

  /// Waits until every peer has consumed the former contents of the segment's memory; returns it.
  std::uint8_t* acquire(const Segment& segment);
  /// Acquires the segment, fills it by write(memory, streaming), and returns its memory. `write`
  /// must not wait, and returns the number of bytes written. Like memcpy and copyStreaming, it must
  /// order its stores before later ones, because publish() releases them. `returns`: peers write
  /// into the segment. Its stores are plain, unless FASTCOLL_STORES says streaming.
  template <typename Write>
  std::uint8_t* fill(const Segment& segment, Write write, bool returns = false) {
    std::uint8_t* memory = acquire(segment);
    if (segment.large) {
      const std::size_t bytes = returns ? 0 : segment.end - segment.begin;
      const bool way =
          stores_.fill(bytes, [&](bool streaming) { return write(memory, streaming); });
      streamed_.store(way, std::memory_order_relaxed);
    } else {
      write(memory, false);
    }
    return memory;
  }
  /// Whether fill() used streaming stores for the last segment of the large ring. Any thread may
  /// call it.
  bool streamed() const { return streamed_.load(std::memory_order_relaxed); }
  /// Makes everything up to and including this segment readable.
  void publish(const Segment& segment);
  /// Waits until the peer has published the segment; at the peer's first segment of a collective,
  /// compares its signature. Returns the peer's memory of the segment. In the large ring, this rank
  /// may write the bytes that are meant for it alone.
  std::uint8_t* await(int peer, const Segment& segment);
  /// The same for a segment without bytes to read.
  void awaitPublished(int peer, const Segment& segment);
  /// Waits until all peers have arrived in the collective, and agree.
  void awaitArrivals();
  /// Waits until all peers have consumed the segment; returns this rank's memory of it.
  std::uint8_t* awaitConsumed(const Segment& segment);
  /// What the peer announced for the present collective; valid once awaited. No offer if the first
  /// segment has at most ArrivalLine::kPayloadBytes and was filled.
  const Offer& offerOf(int peer) const { return arrivalIn(block(peer)).offer; }
  std::uint64_t splitOf(int peer, int destination) const {
    return block(peer).splits(collectives_)[destination];
  }
  std::uint64_t expectedBy(int peer, int source) const {
    return block(peer).splits(collectives_)[size() + source];
  }
  /// Marks all peers' segments, up to and including this one, as consumed by this rank.
  void consume(const Segment& segment);

  /// Offset of [data, data + bytes) in this process's arena, where peers can read it; 0 if it is
  /// not there.
  std::uint64_t directOffset(const void* data, std::size_t bytes) const {
    return memory_.arena().offsetOf(data, bytes);
  }
  /// The message that the peer announced as direct, of `bytes` in total.
  std::uint8_t* directOf(int peer, std::size_t bytes) const {
    return memory_.inPeer(memberOf(peer), offerOf(peer).direct, bytes);
  }
  /// Moves this rank's message, into which peers write, out of shared memory. Call it after a
  /// fault, before the caller gets the error. Never throws.
  void withdraw(const void* data, std::size_t bytes) noexcept;
  /// Throws if the group has failed. For a rank that works for long without a wait.
  void throwIfAborted() {
    if (memory_.aborted()) throwStopReason();
  }

  /// Publishes that this rank has completed the whole collective, including any part outside the
  /// stream.
  void completed(const Signature& signature) {
    completed_ = signature;
    memory_.own().progress.completed.store(signature.seq, std::memory_order_release);
  }
  /// Records the fault on all ranks of the group and throws it.
  [[noreturn]] void fail(ErrorKind kind, const std::string& cause);
  std::string memberName(int peer) const { return memory_.memberName(memberOf(peer)); }

  /// "fastcoll.all_reduce [group 'g', rank 3/8, seq 17]: "
  ErrorSite site() const;

 private:
  // The policy of waitOn().
  template <typename Policy>
  friend void waitOn(const std::atomic<std::uint64_t>&, std::atomic<std::uint32_t>&, std::uint64_t,
                     int, Policy&);
  bool shouldStop();
  [[noreturn]] void throwStopReason();
  TimePoint deadline() { return deadlineAfter(firstDeadline(), 3 * grace_); }

  ControlBlock& block(int peer) const { return memory_.block(memberOf(peer)); }
  /// The line of a rank's arrival in the present collective.
  ArrivalLine& arrivalIn(ControlBlock& block) const { return block.arrivals[collectives_ % 2]; }
  bool hasArrived(int peer) const {
    return block(peer).progress.published.load(std::memory_order_acquire) > next_;
  }
  std::uint64_t completedBy(int peer) const {
    return block(peer).progress.completed.load(std::memory_order_acquire);
  }
  char stateOf(int peer) const { return memory_.process(memberOf(peer)).state(); }
  void wait(int peer, ControlBlock& block, const std::atomic<std::uint64_t>& word,
            std::uint64_t target);
  TimePoint firstDeadline();
  bool checkLostPeers();
  Milliseconds patience() const;
  std::string lateRanks() const;
  void awaitArrival(int peer);
  void compare(int peer);
  [[noreturn]] void failResults();
  void countEqualGradients();
  void checkOperands(ControlBlock& theirs);
  void awaitConsumed(std::uint64_t position);
  void openLargeRing();
  std::uint8_t* memoryOf(const Segment& segment);

  GroupMemory& memory_;
  const std::vector<int> members_;
  const int rank_;
  const bool sharedCache_;
  std::vector<int> others_;
  const std::size_t ringBytes_;
  const int spinMicros_;
  RingStores stores_;  // of the large ring
  std::atomic<bool> streamed_{false};

  std::uint64_t next_ = 0;           // where the present (or next) collective begins
  std::uint64_t reserved_ = 0;       // where the next segment begins
  std::uint64_t consumedByAll_ = 0;  // as of the last read
  bool large_ = false;               // a large segment was placed in the present collective
  std::uint64_t collectives_ = 0;    // ended so far; its parity selects the signature
  Signature signature_{};
  Signature completed_{};   // of the collective before
  int equalGradients_ = 0;  // peers with the same gradients as this rank, in the collective before
  int equalCalls_ = 0;      // collectives in a row with such peers only
  std::vector<std::uint64_t> operands_;  // the sums of the announced digests
  int readers_ = 0;                      // peers whose digests are not in them
  std::uint64_t hash_ = 0;               // of the signature
  std::vector<std::uint64_t> expectedCount_;
  std::vector<std::uint8_t> compared_;
  std::optional<TimePoint> deadline_;
  Milliseconds timeout_{};
  Milliseconds grace_{};
  int awaited_ = -1;       // peer that the present wait is for
  std::string stopCause_;  // set by shouldStop()
  ErrorKind stopKind_ = ErrorKind::Backend;
};

}  // namespace fastcoll
