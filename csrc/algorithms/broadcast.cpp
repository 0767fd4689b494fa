// Broadcast: the root publishes its message segment by segment; every rank copies it.
//
// Steps: 1 per segment. Bytes read per rank: B. The root waits for all ranks to arrive, so that a
// rank which runs something else is an error on all of them and not only where it is noticed. A
// root whose message lies in shared memory publishes it as a whole, and waits for the readers.
#include "direct.hpp"
#include "pipeline.hpp"

namespace fastcoll {
namespace {

void receive(SegmentStream& stream, const Message& message, const Cut& cut, int root,
             bool streaming) {
  for (std::size_t s = 0; s < cut.segments; ++s) {
    const Segment segment = stream.place(cut.length(s));
    if (s == 0) stream.publish(segment);  // it has nothing to show but its arrival
    message.write(cut.offset(s), cut.length(s), stream.await(root, segment), streaming);
    // Last of all: a peer may give its memory back after it.
    if (s + 1 == cut.segments) stream.awaitArrivals();
    stream.consume(segment);
  }
}

}  // namespace

void broadcast(SegmentStream& stream, const Request& request, const TuningTable& tuning) {
  const bool root = stream.rank() == request.root;
  const Message& message = root ? request.in[0] : request.out[0];
  const std::size_t bytes = message.bytes();
  const bool streaming = bytes >= tuning.streamingBytes;
  const bool mayBeDirect = bytes >= tuning.directBytes;
  Arrival arrival = request.arrival();
  if (mayBeDirect && root) arrival.direct = directOffset(stream, request.in);
  stream.begin(arrival, request.expectedCount, nullptr, request.deadline, request.timeout);
  if (mayBeDirect) {
    // The root alone decides; the others hear of it where they would wait for its first segment.
    const Segment first = stream.place(0);
    stream.publish(first);
    if (!root) stream.awaitPublished(request.root, first);
    const std::uint64_t offset = root ? arrival.direct : stream.arrivalOf(request.root).direct;
    if (offset != 0) {
      if (!root) message.write(0, bytes, stream.directOf(request.root, bytes), streaming);
      stream.awaitArrivals();
      stream.consume(first);
      if (root) stream.awaitConsumed(first);
      return stream.end();
    }
  }
  const Cut cut(bytes, segmentLimit(stream, tuning, bytes));
  if (root) {
    publishAll(stream, message, cut);
  } else {
    receive(stream, message, cut, request.root, streaming);
  }
  stream.end();
}

}  // namespace fastcoll
