// All-to-all: every rank publishes, per segment, a piece for each peer; each peer copies its own.
//
// Steps: 1 per segment. Bytes read per rank: what it receives. Messages may differ for every pair,
// and no rank knows the others' sizes, so each announces its own cut (stride, longest message,
// bytes per peer) with its arrival; all then agree on the number of segments, and both ends of
// every pair compare the bytes they mean to exchange.
#include "pipeline.hpp"

namespace fastcoll {
namespace {

/// Every rank looks at every pair, so that a disagreement of two is an error on all.
void comparePairs(SegmentStream& stream, const Arrival& arrival) {
  for (int from = 0; from < stream.size(); ++from) {
    for (int to = 0; to < stream.size(); ++to) {
      const std::uint64_t sent = stream.splitOf(from, to);
      const std::uint64_t expected = stream.expectedBy(to, from);
      if (sent == expected) continue;
      stream.fail(
          ErrorKind::Backend,
          concat("Detected mismatch between collectives on ranks: in ", describe(arrival), " rank ",
                 to, " expects ", expected, " bytes from rank ", from, ", which sends ", sent,
                 ". Give each rank the output splits that match its peers' input splits."));
    }
  }
}

}  // namespace

void allToAll(SegmentStream& stream, const Request& request) {
  const int ranks = stream.size();
  const auto mine = static_cast<std::size_t>(stream.rank());
  std::vector<std::uint64_t> splits;
  std::size_t longest = 0;
  for (std::size_t to = 0; to < request.in.size(); ++to) {
    splits.push_back(request.in[to].bytes());
    if (to != mine) longest = std::max(longest, request.in[to].bytes());
  }
  for (const Message& out : request.out) splits.push_back(out.bytes());
  const Strided cut(longest, ranks, stream.segmentBytes());
  Arrival arrival = request.arrival();
  arrival.pieceBytes = longest;
  arrival.stride = cut.stride;
  const std::uint64_t first =
      stream.begin(arrival, cut.stride * static_cast<std::size_t>(ranks), request.expectedCount,
                   splits.data(), request.deadline, request.timeout);
  const auto fill = [&](std::size_t s) {
    if (s == 0 || s < cut.segments) {
      std::uint8_t* slot = stream.acquire(first + s);
      for (std::size_t to = 0; to < request.in.size(); ++to) {
        if (to == mine) continue;
        const std::size_t length = cut.length(s, request.in[to].bytes());
        request.in[to].read(cut.offset(s), length, slot + to * cut.stride);
      }
    }
    stream.publish(first + s);
  };

  fill(0);
  stream.awaitArrivals();
  comparePairs(stream, arrival);
  std::size_t segments = cut.segments;
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == stream.rank()) continue;
    const Arrival their = stream.arrivalOf(peer);
    if (their.stride > stream.segmentBytes() / static_cast<std::size_t>(ranks) ||
        (their.stride == 0) != (their.pieceBytes == 0) ||
        stream.splitOf(peer, stream.rank()) > their.pieceBytes) {
      stream.fail(ErrorKind::Backend, concat(stream.memberName(peer), " announces a cut of ",
                                             their.stride, " bytes that cannot be"));
    }
    if (their.stride > 0) {
      segments = std::max<std::size_t>(segments, ceilDiv(their.pieceBytes, their.stride));
    }
  }
  // A rank can be wrong about itself only: its own message must fit its own output.
  request.in[mine].copyTo(request.out[mine]);
  for (std::size_t s = 0; s < segments; ++s) {
    if (s + 1 < segments) fill(s + 1);
    for (int i = 1; i < ranks; ++i) {
      const int peer = (stream.rank() + i) % ranks;
      const Message& out = request.out[static_cast<std::size_t>(peer)];
      const std::size_t stride = stream.arrivalOf(peer).stride;
      const std::size_t start = s * stride;
      const std::uint8_t* slot = stream.await(peer, first + s);
      if (start >= out.bytes()) continue;
      out.write(start, std::min(stride, out.bytes() - start), slot + mine * stride);
    }
    stream.consume(first + s);
  }
  stream.end(segments);
}

}  // namespace fastcoll
