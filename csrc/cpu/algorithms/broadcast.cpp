// Broadcast: the root publishes its message segment by segment; every rank copies it.
//
// Steps: 1 per segment. Bytes read per rank: B. The root waits until all ranks have arrived. So a
// rank that runs another collective is an error on all ranks, not only on those that detect it. A
// root whose message lies in shared memory publishes it as a whole, and waits for the readers.
#include "cpu/algorithms/direct.hpp"
#include "cpu/algorithms/pipeline.hpp"

namespace fastcoll {
namespace {

void receive(SegmentStream& stream, const Message& message, const Cut& cut, int root,
             bool streaming) {
  for (std::size_t s = 0; s < cut.segments; ++s) {
    const Segment segment = stream.reserve(cut.length(s));
    if (s == 0) stream.publish(segment);  // announces this rank's arrival only
    message.write(cut.offset(s), cut.length(s), stream.await(root, segment), streaming);
    // The last consume comes last of all, because a peer may free its memory after it.
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
  const std::uint64_t own = mayBeDirect && root ? directOffset(stream, request.in) : 0;
  begin(stream, request, own);
  if (mayBeDirect) {
    // The root alone decides; the others wait for its decision instead of its first segment.
    const Segment first = stream.reserve(0);
    stream.publish(first);
    if (!root) stream.awaitPublished(request.root, first);
    const std::uint64_t offset = root ? own : stream.offerOf(request.root).direct;
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
