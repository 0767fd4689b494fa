// All-gather: every rank publishes its message segment by segment; every rank copies all others.
//
// Steps: 1 per segment. Bytes read per rank: (n - 1) B. The messages may differ in length: a rank
// whose message has ended publishes empty segments until the longest has ended.
#include "pipeline.hpp"

namespace fastcoll {

void allGather(SegmentStream& stream, const Request& request) {
  const Message& in = request.in[0];
  std::size_t longest = 0;
  for (const Message& out : request.out) longest = std::max(longest, out.bytes());
  const std::size_t step = std::min(longest, stream.segmentBytes());
  const std::size_t segments = std::max<std::size_t>(1, step == 0 ? 1 : ceilDiv(longest, step));
  const auto length = [step](std::size_t s, std::size_t total) {
    return s * step >= total ? 0 : std::min(step, total - s * step);
  };
  const std::uint64_t first = stream.begin(request.arrival(), step, request.expectedCount, nullptr,
                                           request.deadline, request.timeout);
  pipelineSegments(
      stream, first, segments,
      [&](std::size_t s) {
        in.read(s * step, length(s, in.bytes()), stream.acquire(first + s));
        stream.publish(first + s);
      },
      [&](std::size_t s) {
        for (int i = 1; i < stream.size(); ++i) {
          const int peer = (stream.rank() + i) % stream.size();
          const std::uint8_t* slot = stream.await(peer, first + s);
          const Message& out = request.out[static_cast<std::size_t>(peer)];
          out.write(s * step, length(s, out.bytes()), slot);
        }
      });
  in.copyTo(request.out[static_cast<std::size_t>(stream.rank())]);
  stream.end(segments);
}

}  // namespace fastcoll
