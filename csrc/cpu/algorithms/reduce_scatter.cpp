// Reduce-scatter: every rank publishes, per segment, a piece for each peer; each rank reduces its
// own pieces.
//
// Steps: 1 per segment. Bytes read per rank: (n - 1) B / n, where B is the sum over all ranks'
// pieces. Two ranks exchange their messages in place if these have at least 8 KiB and fit into
// caches (exchange.hpp).
#include "cpu/algorithms/direct.hpp"
#include "cpu/algorithms/exchange.hpp"
#include "cpu/algorithms/segment_reduce.hpp"

namespace fastcoll {

void reduceScatter(SegmentStream& stream, const Request& request, const TuningTable& tuning) {
  const Message& out = request.out[0];
  const int mine = stream.rank();
  const Message& own = request.in[mine];
  const std::size_t bytes = own.bytes();
  SegmentReducer reducer(request, stream.size());
  const bool mayBeDirect = bytes >= tuning.directBytes;
  DirectRead direct(stream, request, mayBeDirect,
                    mayBeDirect ? directOffset(stream, request.in) : 0);
  if (direct.agreed()) {
    const Cut cut(bytes, segmentLimit(stream, tuning, bytes));
    for (std::size_t s = 0; s < cut.segments; ++s) {
      const std::size_t offset = mine * bytes + cut.offset(s);
      for (const int peer : stream.others()) {
        reducer.source(peer, stream.directOf(peer, bytes * request.in.size()) + offset);
      }
      reducer.ownSource(mine, own, cut.offset(s), cut.length(s));
      reducer.runInto(out, cut.offset(s), cut.length(s));
    }
    return direct.finish();
  }
  if (Exchange::serves(stream, tuning, bytes)) {
    const int peer = 1 - stream.rank();
    const Message& theirs = request.in[peer];
    Exchange exchange(stream, tuning, theirs, bytes, bytes);
    const auto take = [&, reducer](std::size_t offset, std::size_t length,
                                   const std::uint8_t* memory) mutable {
      reducer.source(peer, memory);
      reducer.ownSource(mine, own, offset, length);
      reducer.runInto(out, offset, length);
    };
    // Each piece adds its squares to one sum, in order. So one thread takes them all.
    exchange.run(take, request.squares == nullptr && request.operandDigests == nullptr);
    return stream.end();
  }
  const Strided strided(bytes, stream.size(), segmentLimit(stream, tuning, bytes));
  const Cut& cut = strided.cut;
  pipelineSegments(
      stream, cut.segments, [&](std::size_t) { return strided.bytes(); },
      [&](std::size_t s, std::uint8_t* memory, bool streaming) {
        return strided.write(s, stream.rank(), request.in, memory, streaming);
      },
      [&](std::size_t s, const Segment& segment) {
        const std::size_t length = cut.length(s);
        for (const int peer : stream.others()) {
          reducer.source(peer, stream.await(peer, segment) + strided.place(peer, stream.rank()));
        }
        reducer.ownSource(mine, own, cut.offset(s), length);
        reducer.runInto(out, cut.offset(s), length);
      });
  stream.end();
}

}  // namespace fastcoll
