// Gather, scatter and reduce: one rank, the root, reads from all or writes to all.
//
// Steps: 1 per segment. Bytes read: gather, reduce: the root reads (n - 1) B; scatter: each rank
// reads its own message. As in broadcast, every rank consumes the last segment only after all have
// arrived, because a peer may free its memory after that.
#include "cpu/algorithms/pipeline.hpp"
#include "cpu/algorithms/segment_reduce.hpp"

namespace fastcoll {
namespace {

/// Gather and reduce: the root's drain(s, segment) reads the peers' segment s, the others publish.
template <typename Drain>
void toRoot(SegmentStream& stream, const Request& request, const Cut& cut, Drain drain) {
  begin(stream, request);
  if (stream.rank() != request.root) publishAll(stream, request.in[0], cut);
  for (std::size_t s = 0; stream.rank() == request.root && s < cut.segments; ++s) {
    const Segment segment = stream.reserve(cut.length(s));
    if (s == 0) stream.publish(segment);  // announces this rank's arrival only
    drain(s, segment);
    stream.consume(segment);  // all peers have arrived: this rank has read a segment of each
  }
  stream.end();
}

}  // namespace

void gather(SegmentStream& stream, const Request& request, const TuningTable& tuning) {
  const Message& in = request.in[0];
  const Cut cut(in.bytes(), segmentLimit(stream, tuning, in.bytes()));
  const bool streaming =
      in.bytes() * static_cast<std::size_t>(stream.size()) >= tuning.streamingBytes;
  toRoot(stream, request, cut, [&](std::size_t s, const Segment& segment) {
    for (const int peer : stream.others()) {
      const std::uint8_t* memory = stream.await(peer, segment);
      request.out[peer].write(cut.offset(s), cut.length(s), memory, streaming);
    }
  });
  if (stream.rank() == request.root) in.copyTo(request.out[stream.rank()], streaming);
}

void reduce(SegmentStream& stream, const Request& request, const TuningTable& tuning) {
  const Message& in = request.in[0];
  const std::size_t element = elementSize(request.dtype);
  const std::size_t limit = segmentLimit(stream, tuning, in.bytes());
  const Cut cut(in.bytes(), std::max(element, limit / element * element));
  SegmentReducer reducer(request, stream.size());
  toRoot(stream, request, cut, [&](std::size_t s, const Segment& segment) {
    for (const int peer : stream.others()) reducer.source(peer, stream.await(peer, segment));
    reducer.ownSource(request.root, in, cut.offset(s), cut.length(s));
    reducer.runInto(request.out[0], cut.offset(s), cut.length(s));
  });
}

void scatter(SegmentStream& stream, const Request& request, const TuningTable& tuning) {
  const bool root = stream.rank() == request.root;
  const Message& out = request.out[0];
  const std::size_t bytes = out.bytes();
  const Strided strided(bytes, stream.size(), segmentLimit(stream, tuning, bytes));
  const Cut& cut = strided.cut;
  const bool streaming = bytes >= tuning.streamingBytes;
  begin(stream, request);
  for (std::size_t s = 0; s < cut.segments; ++s) {
    const Segment segment = stream.reserve(strided.bytes());
    if (root) {
      stream.fill(segment, [&](std::uint8_t* memory, bool streams) {
        return strided.write(s, request.root, request.in, memory, streams);
      });
      stream.publish(segment);
    } else {
      if (s == 0) stream.publish(segment);  // announces this rank's arrival only
      const std::uint8_t* memory = stream.await(request.root, segment);
      out.write(cut.offset(s), cut.length(s), memory + strided.place(request.root, stream.rank()),
                streaming);
    }
    if (s + 1 == cut.segments) stream.awaitArrivals();
    stream.consume(segment);
  }
  if (root) request.in[stream.rank()].copyTo(out, streaming);
  stream.end();
}

}  // namespace fastcoll
