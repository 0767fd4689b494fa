// What an exchange between hosts moves: every rank has a parcel for each other host, cut into
// slices, one a step; how long they are, and where they lie in segments and frames.
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

  /// All-to-all: every rank of this host tells the others what it sends and expects.
  void tellSizes(SegmentStream* stream, std::size_t segmentBytes);
  /// Cuts them into slices, of which those that a rank has and those that come to a host fit `room`
  /// together.
  void cut(std::size_t room);
  /// Steps that this host takes part in.
  std::size_t steps() const;
  std::size_t start(std::size_t k) const { return k * slice_; }

  /// A message of so many bytes is in no parcel, but goes from rank to rank. In large groups none
  /// does: each rank would need a connection to each.
  bool isLong(std::size_t bytes) const {
    return !areShared() && hosts_.size() <= kMostConnected && LongMessages::areLong(bytes);
  }
  std::size_t carried(std::size_t bytes) const { return isLong(bytes) ? 0 : bytes; }
  bool isAllToAll() const { return request_.collective == Collective::AllToAll; }
  /// A rank's parcels for all hosts are one and the same.
  bool areShared() const { return request_.collective == Collective::AllGather; }

  /// All-to-all: bytes that rank `from` of another host sends to the rank at `place` of this one,
  /// as that expects, and the other way.
  std::uint64_t expected(std::size_t place, int from) const {
    return told_[place][hosts_.size() + from];
  }
  std::uint64_t given(std::size_t place, int to) const { return told_[place][to]; }

  /// Bytes of a slice of the host's rank for another host, in a step; one of the two is this one.
  std::size_t sliceBytes(int from, std::size_t place, int to, std::size_t k) const;
  /// Of all ranks of a host.
  std::size_t slices(int from, int to, std::size_t k) const;
  /// The parcels from one host to another go with their frame.
  bool inFrame(int from, int to) const;

  /// Where a rank's slice for a host begins in its segment, where a host's slices begin in the
  /// leader's, and how long a rank's segment must be.
  std::size_t placeIn(std::size_t place, int to, std::size_t k) const;
  std::size_t placeOut(int from, std::size_t k) const;
  std::size_t mostIn(std::size_t k) const;

  /// Bytes of sizes at the head of a frame.
  std::size_t headBytes(int from, int to) const;
  /// Writes them for a host; returns where they end.
  std::uint8_t* writeHead(int host, std::uint8_t* at) const;
  /// Throws unless those in a host's frame are what this host expects.
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
