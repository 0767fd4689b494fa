// All-gather: every rank publishes its message segment by segment; every rank copies all others.
//
// Steps: 1 per segment. Bytes read per rank: (n - 1) B. The messages may differ in length: a rank
// whose message has ended publishes empty segments until the longest has ended. Two ranks exchange
// their messages in place if these have at least 8 KiB and fit into caches (exchange.hpp).
#include "cpu/algorithms/direct.hpp"
#include "cpu/algorithms/exchange.hpp"

namespace fastcoll {

void allGather(SegmentStream& stream, const Request& request, const TuningTable& tuning) {
  const Message& in = request.in[0];
  const Message& own = request.out[stream.rank()];
  std::size_t longest = 0;
  std::size_t written = 0;
  for (const Message& out : request.out) {
    longest = std::max(longest, out.bytes());
    written += out.bytes();
  }
  const bool streaming = written >= tuning.streamingBytes;
  const bool mayBeDirect = longest >= tuning.directBytes;
  DirectRead direct(stream, request, mayBeDirect,
                    mayBeDirect ? directOffset(stream, request.in) : 0);
  if (direct.agreed()) {
    for (const int peer : stream.others()) {
      const Message& out = request.out[peer];
      out.write(0, out.bytes(), stream.directOf(peer, out.bytes()), streaming);
    }
    in.copyTo(own, streaming);
    return direct.finish();
  }
  if (Exchange::serves(stream, tuning, longest)) {
    const Message& out = request.out[1 - stream.rank()];
    Exchange exchange(stream, tuning, in, out.bytes(), longest);
    exchange.run([&](std::size_t offset, std::size_t bytes,
                     const std::uint8_t* memory) { out.write(offset, bytes, memory, streaming); },
                 true);
    in.copyTo(own, streaming);
    return stream.end();
  }
  const Cut cut(longest, segmentLimit(stream, tuning, longest));
  pipelineSegments(
      stream, cut.segments, [&](std::size_t s) { return cut.length(s); },
      [&](std::size_t s, std::uint8_t* memory, bool streams) {
        const std::size_t length = cut.length(s, in.bytes());
        in.read(cut.offset(s), length, memory, streams);
        return length;
      },
      [&](std::size_t s, const Segment& segment) {
        for (const int peer : stream.others()) {
          const std::uint8_t* memory = stream.await(peer, segment);
          const Message& out = request.out[peer];
          out.write(cut.offset(s), cut.length(s, out.bytes()), memory, streaming);
        }
      });
  in.copyTo(own, streaming);
  stream.end();
}

}  // namespace fastcoll
