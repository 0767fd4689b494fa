// The stream of segments by which the ranks of a group exchange a collective's bytes.
//
// Every rank owns a ring of memory in its arena. It writes segment after segment into it; all peers
// read the segments in place. A segment has a position in the stream, counted in bytes since the
// group began, and lies in the ring at that position modulo the ring's length. All ranks place the
// same segments for a collective, so that a position names the same thing everywhere and no barrier
// is needed between collectives. Two positions per rank order everything:
//
//   owner:   wait until all peers consumed up to end - ring;  write;  published = end
//   reader:  wait until peer.published >= end;  read;                 consumed = end
//
// A reader may also write: the parts of a segment that are meant for it alone, before it has
// consumed the segment. The owner, which reads them once all peers have consumed it, finds there
// what they wrote; so a result goes back in the lines that its operands came in.
//
// Release/acquire on the two orders the plain writes and reads of the ring. A segment is written
// over only by one that ends a whole ring later, and `consumed` is always the end of a segment, so
// waiting for end - ring frees every segment that the new one overlaps.
//
// The ring is cycled through in full whatever the size of the segments: to write a line that a peer
// still caches is several times slower than to write one that has left its cache, so the ring is
// longer than a core's second-level cache. Collectives of segments of up to kSmallSegmentBytes go
// through a small ring in the control block, in the same positions, so that a group that moves no
// more needs no other memory; but for those in which readers write.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "group_memory.hpp"
#include "ring_stores.hpp"

namespace fastcoll {

/// A place in the stream, the same on all ranks.
struct Segment {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  bool large = false;  // it lies in the large ring
};

class SegmentStream : private WaitGuard {
 public:
  /// `members`: the ranks of the group, this one among them, whose blocks are bound: they share
  /// this stream. In all that follows a peer is named by its place among them.
  SegmentStream(GroupMemory& memory, std::vector<int> members, std::size_t ringBytes,
                int spinMicros, StoresChoice stores);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  /// The rank in the group of the member at this place.
  int memberOf(int place) const { return members_[place]; }
  /// Bytes of the large ring. A segment takes a quarter at most: three are under way at once,
  /// behind, present and ahead, and the end of the ring may be too short for one.
  std::size_t ringBytes() const { return ringBytes_; }

  /// Extends the deadline while the missing peer may itself wait for another host, because that
  /// peer can name the cause: by twice this if all peers have arrived, by three times if those that
  /// have not are still in a collective that this rank has completed. Not if a peer is stopped.
  void setGrace(Milliseconds grace) { grace_ = grace; }
  /// Starts a collective: announces its signature. `expectedCount[peer]` tells how many elements
  /// each peer must announce; empty means as many as this rank does. `splits` are the bytes sent to
  /// each peer and expected from each (all_to_all), or nullptr.
  void begin(const Arrival& arrival, const std::vector<std::uint64_t>& expectedCount,
             const std::uint64_t* splits, TimePoint deadline, Milliseconds timeout);
  /// The next `bytes` of the stream, at least a cache line. All ranks must place the same. `large`:
  /// in the large ring, whatever its size; the only one whose memory waits for late writers.
  Segment place(std::size_t bytes, bool large = false);
  /// Takes back what was placed after `last` in the present collective, none of which this rank has
  /// published. What lies there may have been written.
  void placeAfter(const Segment& last) {
    placed_ = last.end;
    large_ = last.large;
  }
  /// Ends the collective: this rank has published and consumed all that it placed.
  void end();

  /// This rank's memory for the segment, once every peer has finished with what was there.
  std::uint8_t* acquire(const Segment& segment);
  /// Acquires the segment and fills it by write(memory, streaming), which waits for nobody, returns
  /// how many bytes it has written, and orders its stores before later ones as memcpy and
  /// copyStreaming do: publish() releases them. Returns the memory.
  template <typename Write>
  std::uint8_t* fill(const Segment& segment, Write write) {
    std::uint8_t* memory = acquire(segment);
    if (segment.large) {
      const std::size_t bytes = segment.end - segment.begin;
      const bool way =
          stores_.fill(bytes, [&](bool streaming) { return write(memory, streaming); });
      streamed_.store(way, std::memory_order_relaxed);
    } else {
      write(memory, false);
    }
    return memory;
  }
  /// Whether the last segment that fill() wrote to the large ring was written so. Of any thread.
  bool streamed() const { return streamed_.load(std::memory_order_relaxed); }
  /// Makes everything up to and including this segment readable.
  void publish(const Segment& segment);
  /// Waits until the peer has published the segment; at the peer's first segment of a collective
  /// its signature is compared. Returns the peer's memory of it, which this rank may write where
  /// the bytes are meant for it alone and the segment is one of the large ring.
  std::uint8_t* await(int peer, const Segment& segment);
  /// The same, where the segment has no bytes to be read.
  void awaitPublished(int peer, const Segment& segment);
  /// Waits until all peers have arrived in the collective, and agree.
  void awaitArrivals();
  /// Waits until all peers have consumed the segment; returns this rank's memory of it.
  std::uint8_t* awaitConsumed(const Segment& segment);
  /// What the peer announced for the present collective; valid once awaited.
  const Arrival& arrivalOf(int peer) const;
  std::uint64_t splitOf(int peer, int destination) const;
  std::uint64_t expectedBy(int peer, int source) const;
  /// This rank has finished reading all peers' segments up to and including this one.
  void consume(const Segment& segment);

  /// Offset of [data, data + bytes) in this process's arena if it lies there, so that peers can
  /// read it where it is; else 0.
  std::uint64_t directOffset(const void* data, std::size_t bytes) const;
  /// The message that the peer announced as direct, of `bytes` in all.
  std::uint8_t* directOf(int peer, std::size_t bytes) const;
  /// Takes this rank's message, into which peers write, out of their reach: after a fault, before
  /// the caller hears of it. Never throws.
  void withdraw(const void* data, std::size_t bytes) noexcept;
  /// For a rank that does without waiting for long: throws once the group has failed.
  void throwIfAborted();

  /// Publishes that this rank has completed the whole collective, which may have had parts outside
  /// of the stream.
  void completed(std::uint64_t seq) {
    memory_.own().progress.completed.store(seq, std::memory_order_release);
  }
  /// Records the fault on all ranks of the group and throws it.
  [[noreturn]] void fail(ErrorKind kind, const std::string& cause);
  std::string memberName(int peer) const { return memory_.memberName(memberOf(peer)); }

  /// "fastcoll.all_reduce [group 'g', rank 3/8, seq 17]: "
  std::string prefix() const;

  /// Scratch memory of this rank, for what must not land in a segment that others read.
  std::uint8_t* scratch(std::size_t bytes);

 private:
  bool hopeless() override;
  [[noreturn]] void raise() override;
  TimePoint deadline() const override { return deadlineAfter(deadline_, 3 * grace_); }
  bool checkWorthlessPeers();
  char stateOf(int peer) const;
  Milliseconds patience() const;
  std::string lateRanks() const;
  void awaitArrival(int peer);
  void compare(int peer);
  void awaitConsumed(std::uint64_t position);
  void openLargeRing();
  std::uint8_t* memoryOf(const Segment& segment);

  GroupMemory& memory_;
  const std::vector<int> members_;
  const int rank_;
  const std::size_t ringBytes_;
  const int spinMicros_;
  RingStores stores_;  // of the large ring
  std::atomic<bool> streamed_{false};

  std::uint64_t next_ = 0;           // where the present (or next) collective begins
  std::uint64_t placed_ = 0;         // where the next segment begins
  std::uint64_t consumedByAll_ = 0;  // as far as is known
  bool large_ = false;               // a large segment was placed in the present collective
  std::uint64_t collectives_ = 0;    // done so far; its parity names the arrival line in use
  Arrival arrival_{};
  std::vector<std::uint64_t> expectedCount_;
  std::vector<std::uint8_t> compared_;
  TimePoint deadline_;
  Milliseconds timeout_{};
  Milliseconds grace_{};
  int awaited_ = -1;           // peer that the present wait is for
  std::string hopelessCause_;  // set by hopeless()
  ErrorKind hopelessKind_ = ErrorKind::Backend;
  std::vector<std::uint8_t> scratch_;
};

/// Whether two ranks' signatures name the same collective; `expected` is the count it must
/// announce.
bool agree(const Arrival& mine, const Arrival& theirs, std::uint64_t expected);

/// "all_reduce(seq 17, float32[1000], SUM)"
std::string describe(const Arrival& arrival);

}  // namespace fastcoll
