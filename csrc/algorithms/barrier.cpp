// Barrier: one empty segment; a rank leaves when it has seen everybody's.
//
// Steps: 1. Bytes read: none but the counters and signatures of the peers.
#include "algorithm.hpp"

namespace fastcoll {

void barrier(SegmentStream& stream, const Request& request) {
  const std::uint64_t segment = stream.begin(request.arrival(), 0, request.expectedCount, nullptr,
                                             request.deadline, request.timeout);
  stream.publish(segment);
  stream.awaitArrivals();
  stream.consume(segment);
  stream.end(1);
}

}  // namespace fastcoll
