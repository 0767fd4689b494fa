// Messages that lie in shared memory already (allocate_tensor) are read by the peers where they
// are, without the copy into the ring. All ranks must be able to, and must know it of each other:
//
//   every rank announces the offset of its message, or 0, with its signature (Arrival::direct);
//   one that announced 0 knows that the ring will be used and goes on without waiting;
//   the others wait for all signatures, which tell all of them the same.
#pragma once

#include "algorithm.hpp"

namespace fastcoll {

/// What to announce for the messages: their offset, if they lie in one run.
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
  /// Places the segment of arrival; all ranks do so or none.
  explicit DirectRead(SegmentStream& stream) : stream_(stream), arrival_(stream.place(0)) {}

  /// True if every rank announced its message, on all ranks alike.
  bool agreed(std::uint64_t own) {
    if (own == 0) return false;
    stream_.publish(arrival_);
    stream_.awaitArrivals();
    for (int peer = 0; peer < stream_.size(); ++peer) {
      if (peer != stream_.rank() && stream_.arrivalOf(peer).direct == 0) return false;
    }
    return true;
  }
  /// This rank has read what it needs; returns when nobody reads this rank's message any more.
  void finish() {
    stream_.consume(arrival_);
    stream_.awaitConsumed(arrival_);
    stream_.end();
  }

 private:
  SegmentStream& stream_;
  const Segment arrival_;
};

}  // namespace fastcoll
