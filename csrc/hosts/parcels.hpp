// What an exchange between hosts moves. Every rank has a parcel for each other host, cut into
// slices, one a step. Here are their lengths, and their places in segments and frames.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "spanning.hpp"

namespace fastcoll {

class Parcels {
 public:
  Parcels(const Hosts& hosts, const Request& request)
      : hosts_(hosts), request_(request), here_(hosts.here()), place_(hosts.place()) {}

  /// All-to-all: every rank of this host sends the others the sizes that it sends and expects.
  void tellSizes(SegmentStream* stream, std::size_t segmentBytes);
  /// Cuts parcels into slices. The slices that a rank has in a step, and those that arrive at a
  /// host, together fit `room`.
  void cut(std::size_t room);
  /// Steps that this host takes part in.
  std::size_t steps() const;
  std::size_t start(std::size_t k) const { return k * slice_; }

  /// Whether a message of `bytes` goes from rank to rank, in no parcel. In large groups none does,
  /// because each rank would need a connection to each other rank.
  bool isLong(std::size_t bytes) const {
    return !areShared() && hosts_.size() <= kMostConnected && LongMessages::areLong(bytes);
  }
  std::size_t carried(std::size_t bytes) const { return isLong(bytes) ? 0 : bytes; }
  bool isAllToAll() const { return request_.collective == Collective::AllToAll; }
  /// Whether a rank's parcels for all hosts are the same.
  bool areShared() const { return request_.collective == Collective::AllGather; }

  /// All-to-all: bytes that the rank at `place` of this host expects from rank `from` of another
  /// host, and gives to rank `to` there.
  std::uint64_t expected(std::size_t place, int from) const {
    return told_[place][hosts_.size() + from];
  }
  std::uint64_t given(std::size_t place, int to) const { return told_[place][to]; }

  /// Bytes of the slice in step `k` from the rank at `place` of host `from` to host `to`. One of
  /// the two is this host.
  std::size_t sliceBytes(int from, std::size_t place, int to, std::size_t k) const;
  /// The sum over all ranks of host `from`.
  std::size_t slices(int from, int to, std::size_t k) const;
  /// Whether the parcels from one host to another go with their frame.
  bool inFrame(int from, int to) const;

  /// Where a rank's slice for a host begins in its segment, and where a host's slices begin in the
  /// leader's. And the length that the ranks' segments must have.
  std::size_t placeIn(std::size_t place, int to, std::size_t k) const;
  std::size_t placeOut(int from, std::size_t k) const;
  std::size_t mostIn(std::size_t k) const;

  /// Bytes of sizes at the head of a frame.
  std::size_t headBytes(int from, int to) const;
  /// Writes the sizes for a host; returns where they end.
  std::uint8_t* writeHead(int host, std::uint8_t* at) const;
  /// Throws unless the sizes in a host's frame are what this host expects.
  void compareHead(const Links& links, int host) const;

 private:
  static constexpr int kMostConnected = 128;
  using Sizes = std::vector<std::uint64_t>;

  std::size_t parcel(int from, std::size_t place, int to) const;
  std::size_t stepsOf(int from, int to) const;

  const Hosts& hosts_;
  const Request& request_;
  const int here_;
  const std::size_t place_;
  std::vector<Sizes> told_;  // all-to-all, of each rank here: bytes it gives and expects
  std::size_t slice_ = 1;    // most bytes of a parcel in a step
};

}  // namespace fastcoll
