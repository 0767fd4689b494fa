// All-reduce in one shot, for small messages.
//
// Phases: every rank publishes its message; every rank reads all messages and reduces them by the
//         same tree over the ranks, so all get the same bits.
// Steps: 1. Bytes read per rank: (n - 1) B. Chosen: up to TuningTable::oneShotBytes.
#include "cpu/algorithms/algorithm.hpp"
#include "cpu/algorithms/segment_reduce.hpp"

namespace fastcoll {

void oneShotAllReduce(SegmentStream& stream, const Request& request) {
  const Message& in = request.in[0];
  const std::size_t bytes = in.bytes();
  SegmentReducer reducer(request, stream.size());
  begin(stream, request);
  const Segment segment = stream.reserve(bytes);
  stream.fill(segment, [&](std::uint8_t* to, bool streaming) {
    in.read(0, bytes, to, streaming);
    return bytes;
  });
  stream.publish(segment);
  // Not read from the ring, because the peers are fetching its lines.
  reducer.ownSource(stream.rank(), in, 0, bytes);
  for (const int peer : stream.others()) reducer.source(peer, stream.await(peer, segment));
  reducer.shareWith(bytes, stream.rank());
  const std::uint8_t* result = reducer.runInto(request.out[0], 0, bytes);
  reducer.measureShare(request, result, bytes, stream.rank());
  stream.consume(segment);
  stream.end();
}

}  // namespace fastcoll
