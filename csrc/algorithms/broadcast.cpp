// Broadcast: the root publishes its message segment by segment; every rank copies it.
//
// Steps: 1 per segment. Bytes read per rank: B. The root waits for all ranks to arrive, so that a
// rank which runs something else is an error on all of them and not only where it is noticed.
#include "pipeline.hpp"

namespace fastcoll {

void broadcast(SegmentStream& stream, const Request& request) {
  const bool root = stream.rank() == request.root;
  const Message& message = root ? request.in[0] : request.out[0];
  const std::size_t bytes = message.bytes();
  const std::size_t step = std::min(bytes, stream.segmentBytes());
  const std::size_t segments = step == 0 ? 1 : ceilDiv(bytes, step);
  const auto length = [&](std::size_t s) { return std::min(step, bytes - s * step); };
  const std::uint64_t first = stream.begin(request.arrival(), step, request.expectedCount, nullptr,
                                           request.deadline, request.timeout);
  const std::uint64_t last = first + segments - 1;
  if (root) {
    if (segments > 1) stream.consume(last - 1);  // it reads nothing
    for (std::size_t s = 0; s < segments; ++s) {
      message.read(s * step, length(s), stream.acquire(first + s));
      stream.publish(first + s);
    }
  } else {
    stream.publish(last);  // it has nothing to show but its arrival
    for (std::size_t s = 0; s < segments; ++s) {
      message.write(s * step, length(s), stream.await(request.root, first + s));
      if (s + 1 < segments) stream.consume(first + s);
    }
  }
  stream.awaitArrivals();
  stream.consume(last);  // last of all: a peer may give its memory back after it
  stream.end(segments);
}

}  // namespace fastcoll
