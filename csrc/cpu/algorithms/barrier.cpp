// Barrier: one empty segment; a rank leaves once it has seen those of all peers.
//
// Steps: 1. Bytes read: none but the counters and signatures of the peers.
#include "cpu/algorithms/algorithm.hpp"

namespace fastcoll {

void barrier(SegmentStream& stream, const Request& request) {
  begin(stream, request);
  const Segment segment = stream.reserve(0);
  stream.publish(segment);
  stream.awaitArrivals();
  stream.consume(segment);
  stream.end();
}

}  // namespace fastcoll
