// All-reduce of messages that lie in shared memory, in place: no ring, and one phase.
//
// Phases: a message is cut into one piece per rank. Each rank reduces its piece of all messages,
//         and writes the result over that piece of every message. It does so block by block, while
//         the block is in the first-level cache. No other rank accesses that piece before all have
//         finished. So ranks wait for each other only when they arrive and at the end.
// Bytes read per rank: B; written: B. A rank writes the lines that it has just read. So memory is
//         read once and written once, as when a rank scales its own message: the lower bound that
//         the benchmark measures. A read of a peer's result would fetch lines that are dirty in
//         the peer's cache. That costs more than the sum itself.
//
// After a fault, a peer that has not detected it yet may still write. The caller must be able to
// use its tensor once it has the error. So the tensor is first withdrawn from shared memory.
#include "cpu/algorithms/direct.hpp"
#include "cpu/algorithms/segment_reduce.hpp"

namespace fastcoll {
namespace {

void reducePiece(SegmentStream& stream, const Request& request, std::size_t limit) {
  const std::size_t element = elementSize(request.dtype);
  const std::size_t bytes = request.in[0].bytes();
  const Piece mine = pieceOf(bytes / element, stream.size(), stream.rank());
  const std::size_t begin = mine.start * element;
  const std::size_t length = mine.count * element;

  SegmentReducer reducer(request, stream.size());
  std::uint8_t* const own = request.out[0].contiguous(0, bytes) + begin;
  std::vector<std::uint8_t*> others;
  for (std::size_t at = 0; at < length; at += limit) {
    stream.throwIfAborted();
    reducer.source(stream.rank(), own + at);
    others.clear();
    for (const int peer : stream.others()) {
      others.push_back(stream.directOf(peer, bytes) + begin + at);
      reducer.source(peer, others.back());
    }
    reducer.digest(begin + at, 0, std::min(limit, length - at));
    reducer.run(own + at, std::min(limit, length - at), others);
  }
}

}  // namespace

bool directAllReduce(SegmentStream& stream, const Request& request, const TuningTable& tuning) {
  const Message& in = request.in[0];
  const std::uint8_t* data = in.contiguous(0, in.bytes());
  const bool mayBeDirect = in.bytes() >= tuning.directAllReduceBytes;
  const bool inPlace = mayBeDirect && data == request.out[0].contiguous(0, in.bytes());
  const std::uint64_t own = inPlace ? directOffset(stream, request.in) : 0;
  DirectRead direct(stream, request, mayBeDirect, own);
  try {
    if (!direct.agreed()) return false;
    reducePiece(stream, request, segmentLimit(stream, tuning, in.bytes()));
    direct.finish();
    return true;
  } catch (...) {
    const Message& out = request.out[0];
    if (own != 0) stream.withdraw(out.contiguous(0, out.bytes()), out.bytes());
    throw;
  }
}

}  // namespace fastcoll
