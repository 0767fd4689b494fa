// A group of one rank: no bytes travel, but AVG and PREMUL_SUM still compute.
#include "cpu/algorithms/algorithm.hpp"
#include "cpu/algorithms/segment_reduce.hpp"

namespace fastcoll {

void runSingleRank(const Request& request) {
  if (request.out.empty()) return;
  const Message& in = request.in.empty() ? request.out[0] : request.in[0];
  const Message& out = request.out[0];
  if (request.op != ReduceOp::None) {
    SegmentReducer reducer(request, 1);
    constexpr std::size_t kChunk = 1 << 16;  // a multiple of every element size
    const std::size_t widening = reducer.widening();
    const std::uint8_t* whole = in.contiguous(0, in.bytes());
    std::uint8_t* result = out.contiguous(0, in.bytes() * widening);
    if (whole != nullptr && result != nullptr) {
      reducer.source(0, whole);
      return reducer.run(result, in.bytes());
    }
    const std::size_t most = std::min(kChunk, in.bytes());
    std::vector<std::uint8_t> gathered, scattered;  // empty as long as the message is in one run
    for (std::size_t at = 0; at < in.bytes(); at += kChunk) {
      const std::size_t length = std::min(kChunk, in.bytes() - at);
      const std::uint8_t* source = in.contiguous(at, length);
      std::uint8_t* direct = out.contiguous(at * widening, length * widening);
      if (source == nullptr) {
        gathered.resize(most);
        in.read(at, length, gathered.data());
        source = gathered.data();
      }
      reducer.source(0, source);
      if (direct == nullptr) scattered.resize(most * widening);
      result = direct != nullptr ? direct : scattered.data();
      reducer.run(result, length);
      if (direct == nullptr) out.write(at * widening, length * widening, result);
    }
  } else if (!request.in.empty()) {
    in.copyTo(out);
  }
}

}  // namespace fastcoll
