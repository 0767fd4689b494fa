// If messages already lie in shared memory (allocate_tensor), peers read them in place, without the
// copy into the ring. This needs the messages of all ranks, so the ranks agree on it:
//
//   every rank announces the offset of its message, or 0, with its arrival (Offer::direct);
//   a rank that announced 0 uses the ring and goes on without waiting;
//   the other ranks wait for all arrivals, from which all of them decide alike.
#pragma once

#include "cpu/algorithms/algorithm.hpp"

namespace fastcoll {

/// The offset to announce for the messages if they are one run in shared memory; else 0.
inline std::uint64_t directOffset(const SegmentStream& stream, const std::vector<Message>& run) {
  std::size_t bytes = 0;
  const std::uint8_t* first = run.empty() ? nullptr : run[0].contiguous(0, run[0].bytes());
  for (const Message& message : run) {
    const std::uint8_t* start = message.contiguous(0, message.bytes());
    if (start == nullptr || start != first + bytes) return 0;
    bytes += message.bytes();
  }
  return bytes == 0 ? 0 : stream.directOffset(first, bytes);
}

class DirectRead {
 public:
  /// Begins the collective. `may`, alike on all ranks: whether it can be direct. `own`: the offset
  /// that this rank announces, or 0.
  DirectRead(SegmentStream& stream, const Request& request, bool may, std::uint64_t own)
      : stream_(stream), own_(own) {
    begin(stream, request, own);
    if (may) first_ = stream.reserve(0);
  }

  /// True, on all ranks alike, if every rank announced an offset.
  bool agreed() {
    if (own_ == 0) return false;
    stream_.publish(first_);
    stream_.awaitArrivals();
    for (const int peer : stream_.others()) {
      if (stream_.offerOf(peer).direct == 0) return false;
    }
    return true;
  }
  /// Call it once this rank has read all that it needs. Returns when no peer reads this rank's
  /// message any more.
  void finish() {
    stream_.consume(first_);
    stream_.awaitConsumed(first_);
    stream_.end();
  }

 private:
  SegmentStream& stream_;
  const std::uint64_t own_;
  Segment first_;  // the arrival
};

}  // namespace fastcoll
