// The stream of segments by which the ranks of a group exchange a collective's bytes.
//
// Every rank owns a ring of kSlots slots in its arena and publishes segment after segment in it;
// all peers read the slots in place. Two counters per rank order everything: `published` (slots
// that may be read) and `consumed` (segments of the peers that this rank has finished with). All
// ranks take the same number of segments for a collective, so that a segment number names the same
// thing everywhere and no barrier is needed between collectives:
//
//   owner:   wait until all peers consumed segment s - kSlots;  write slot;  published = s + 1
//   reader:  wait until peer.published > s;  read slot;         consumed = s + 1
//
// Release/acquire on the counters orders the plain writes and reads of the slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "group_memory.hpp"

namespace fastcoll {

class SegmentStream : private WaitGuard {
 public:
  SegmentStream(GroupMemory& memory, std::size_t segmentBytes, int spinMicros);

  int rank() const { return memory_.rank(); }
  int size() const { return memory_.size(); }
  /// Bytes of a slot of the large ring.
  std::size_t segmentBytes() const { return segmentBytes_; }

  /// Starts a collective: announces its signature and chooses the small or large ring by the bytes
  /// that any one segment of it will need (equal on all ranks). `expectedCount[peer]` tells how
  /// many elements each peer must announce; empty means as many as this rank does. `splits` are the
  /// bytes sent to each peer (all_to_all), or nullptr. Returns its first segment number.
  std::uint64_t begin(const Arrival& arrival, std::size_t bytesPerSegment,
                      const std::vector<std::uint64_t>& expectedCount, const std::uint64_t* splits,
                      TimePoint deadline, Milliseconds timeout);
  /// Ends it after `segments` segments.
  void end(std::uint64_t segments);

  /// This rank's slot for the segment, once every peer has finished with the slot's last content.
  std::uint8_t* acquire(std::uint64_t segment);
  /// Makes all segments up to and including this one readable.
  void publish(std::uint64_t segment);
  /// Waits until the peer has published the segment; on the peer's first segment of a collective
  /// its signature is compared. Returns the slot.
  const std::uint8_t* await(int peer, std::uint64_t segment);
  /// Awaits the first segment of every peer: after it all ranks have arrived and agree.
  void awaitArrivals();
  /// What the peer announced for the present collective; valid once awaited.
  const Arrival& arrivalOf(int peer) const;
  std::uint64_t splitOf(int peer, int destination) const;
  std::uint64_t expectedBy(int peer, int source) const;
  /// This rank has finished reading all peers' segments up to and including this one.
  void consume(std::uint64_t segment);

  /// Records the fault on all ranks of the group and throws it.
  [[noreturn]] void fail(ErrorKind kind, const std::string& cause);
  std::string memberName(int peer) const { return memory_.memberName(peer); }

  /// "fastcoll.all_reduce [group 'g', rank 3/8, seq 17]: "
  std::string prefix() const;

  /// Scratch memory of this rank, for results that must not land in a slot others read.
  std::uint8_t* scratch(std::size_t bytes);

 private:
  bool hopeless() override;
  [[noreturn]] void raise() override;
  TimePoint deadline() const override { return deadline_; }
  bool checkWorthlessPeers();
  std::string lateRanks() const;
  void compare(int peer);
  void openLargeRing();

  GroupMemory& memory_;
  const std::size_t segmentBytes_;
  const int spinMicros_;

  std::uint64_t next_ = 0;         // first segment of the present (or next) collective
  std::uint64_t collectives_ = 0;  // done so far; its parity names the arrival line in use
  Arrival arrival_{};
  const std::vector<std::uint64_t>* expectedCount_ = nullptr;
  std::vector<std::uint8_t> compared_;
  bool large_ = false;
  TimePoint deadline_;
  Milliseconds timeout_{};
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
