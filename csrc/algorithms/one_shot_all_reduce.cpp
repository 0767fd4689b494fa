// All-reduce in one shot, for small messages.
//
// Phases: every rank publishes its message; every rank reads all messages and reduces them in rank
//         order, so that all get the same bits.
// Steps: 1. Bytes read per rank: (n - 1) B. Chosen: up to SelectorTable::oneShotAllReduceBytes.
#include "algorithm.hpp"
#include "segment_reduce.hpp"

namespace fastcoll {

void oneShotAllReduce(SegmentStream& stream, const Request& request) {
  const Message& in = request.in[0];
  const Message& out = request.out[0];
  const std::size_t bytes = in.bytes();
  SegmentReducer reducer(request, stream.size());
  const std::uint64_t segment = stream.begin(request.arrival(), bytes, request.expectedCount,
                                             nullptr, request.deadline, request.timeout);
  std::uint8_t* slot = stream.acquire(segment);
  in.read(0, bytes, slot);
  stream.publish(segment);
  for (int step = 0; step < stream.size(); ++step) {
    const int peer = (stream.rank() + step) % stream.size();
    reducer.source(peer, step == 0 ? slot : stream.await(peer, segment));
  }
  if (bytes > 0) {
    std::uint8_t* direct = out.contiguous(0, bytes);
    std::uint8_t* result = direct != nullptr ? direct : stream.scratch(bytes);
    reducer.run(result, bytes / elementSize(request.dtype));
    if (direct == nullptr) out.write(0, bytes, result);
  }
  stream.consume(segment);
  stream.end(1);
}

}  // namespace fastcoll
