// Reduce-scatter: every rank publishes, per segment, a piece for each rank; each rank reduces its
// own pieces in rank order.
//
// Steps: 1 per segment. Bytes read per rank: (n - 1) B / n, where B is the sum over all ranks'
// pieces.
#include "pipeline.hpp"
#include "segment_reduce.hpp"

namespace fastcoll {

void reduceScatter(SegmentStream& stream, const Request& request) {
  const Message& out = request.out[0];
  const std::size_t bytes = out.bytes();
  const std::size_t element = elementSize(request.dtype);
  const Strided cut(bytes, stream.size(), stream.segmentBytes());
  const auto mine = static_cast<std::size_t>(stream.rank());
  SegmentReducer reducer(request, stream.size());
  const std::uint64_t first =
      stream.begin(request.arrival(), cut.stride * static_cast<std::size_t>(stream.size()),
                   request.expectedCount, nullptr, request.deadline, request.timeout);
  std::uint8_t* slots[2] = {nullptr, nullptr};
  pipelineSegments(
      stream, first, cut.segments,
      [&](std::size_t s) {
        std::uint8_t* slot = stream.acquire(first + s);
        const std::size_t length = cut.length(s, bytes);
        for (std::size_t to = 0; to < request.in.size(); ++to) {
          // This rank's own piece is read where it lies, unless it is scattered over tensors.
          const bool direct = request.in[to].contiguous(cut.offset(s), length) != nullptr;
          if (to == mine && direct) continue;
          request.in[to].read(cut.offset(s), length, slot + to * cut.stride);
        }
        stream.publish(first + s);
        slots[s % 2] = slot;
      },
      [&](std::size_t s) {
        const std::size_t length = cut.length(s, bytes);
        for (int i = 0; i < stream.size(); ++i) {
          const int peer = (stream.rank() + i) % stream.size();
          const std::uint8_t* source = nullptr;
          if (i == 0) source = request.in[mine].contiguous(cut.offset(s), length);
          if (source == nullptr) {
            source = (i == 0 ? slots[s % 2] : stream.await(peer, first + s)) + mine * cut.stride;
          }
          reducer.source(peer, source);
        }
        if (length == 0) return;
        std::uint8_t* direct = out.contiguous(cut.offset(s), length);
        std::uint8_t* result = direct != nullptr ? direct : stream.scratch(length);
        reducer.run(result, length / element);
        if (direct == nullptr) out.write(cut.offset(s), length, result);
      });
  stream.end(cut.segments);
}

}  // namespace fastcoll
