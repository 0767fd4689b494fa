// All-reduce by reduce-scatter and all-gather, pipelined over segments that stay in cache.
//
// Phases, for each segment s: A(s) every rank publishes the pieces that its peers reduce; each rank
//         reduces its own piece in rank order, writes it to its output and publishes it as B(s);
//         every rank copies the other ranks' pieces from B(s).
// Order:  publish A(0) | A(s+1), reduce A(s), publish B(s), copy B(s-1) | ... The look-ahead of one
//         segment hides the wait for the peers. Segments are placed, published and consumed in one
//         order: A0 A1 B0 A2 B1 A3 B2 ... A(S-1) B(S-2) B(S-1).
// Steps: 2 per segment. Bytes read per rank: 2 (n - 1) B / n. Chosen: above the one-shot limit.
#include "direct.hpp"
#include "segment_reduce.hpp"

namespace fastcoll {
namespace {

class Pipeline {
 public:
  Pipeline(SegmentStream& stream, const Request& request, const TuningTable& tuning)
      : stream_(stream),
        in_(request.in[0]),
        out_(request.out[0]),
        reducer_(request, stream.size()),
        element_(elementSize(request.dtype)),
        perSegment_(segmentLimit(stream, tuning, in_.bytes()) / element_),
        total_(in_.bytes() / element_),
        segments_(ceilDiv(total_, perSegment_)),
        fetches_(in_.bytes() > tuning.longBytes) {}

  void run() {
    Segment ahead = publishInput(0);
    Segment behind;
    for (std::size_t s = 0; s < segments_; ++s) {
      const Segment present = ahead;
      if (s + 1 < segments_) ahead = publishInput(s + 1);
      const Segment result = reducePiece(s, present);
      if (s > 0) copyPieces(s - 1, behind);
      behind = result;
    }
    copyPieces(segments_ - 1, behind);
    stream_.end();
  }

 private:
  std::size_t elements(std::size_t s) const {
    return std::min(perSegment_, total_ - s * perSegment_);
  }
  Piece piece(std::size_t s, int rank) const { return pieceOf(elements(s), stream_.size(), rank); }
  /// The piece in the message, in bytes.
  std::size_t offset(std::size_t s, int rank) const {
    return (s * perSegment_ + piece(s, rank).start) * element_;
  }
  std::size_t bytes(std::size_t s, int rank) const { return piece(s, rank).count * element_; }
  /// The piece for `to` in the segment A(s) of `owner`, which holds all pieces but the owner's own.
  std::size_t place(std::size_t s, int owner, int to) const {
    const std::size_t skipped = to > owner ? piece(s, owner).count : 0;
    return (piece(s, to).start - skipped) * element_;
  }

  Segment publishInput(std::size_t s) {
    // Pieces shrink with the rank: nobody leaves out less than the last one.
    const std::size_t most = elements(s) - piece(s, stream_.size() - 1).count;
    const Segment segment = stream_.place(most * element_);
    stream_.fill(segment, [&](std::uint8_t* memory, bool streaming) {
      for (int i = 1; i < stream_.size(); ++i) {
        const int to = (stream_.rank() + i) % stream_.size();
        in_.read(offset(s, to), bytes(s, to), memory + place(s, stream_.rank(), to), streaming);
      }
      return (elements(s) - piece(s, stream_.rank()).count) * element_;
    });
    stream_.publish(segment);
    return segment;
  }

  Segment reducePiece(std::size_t s, const Segment& input) {
    const std::size_t length = bytes(s, stream_.rank());
    const std::size_t at = offset(s, stream_.rank());
    for (int i = 1; i < stream_.size(); ++i) {
      const int peer = (stream_.rank() + i) % stream_.size();
      reducer_.source(peer, stream_.await(peer, input) + place(s, peer, stream_.rank()));
    }
    reducer_.ownSource(stream_, in_, at, length);
    const Segment segment = stream_.place(bytes(s, 0));  // the longest piece
    std::uint8_t* memory = stream_.acquire(segment);
    const bool streams = stream_.streams(segment);
    if (std::uint8_t* direct = out_.contiguous(at, length); direct != nullptr) {
      // Meanwhile what the peers are to get of the next segment but one comes from memory.
      reducer_.runTwice(direct, memory, length, ahead(s + 2, (stream_.rank() + 1) % stream_.size()),
                        streams);
    } else if (length > 0) {
      // The kernels know plain stores only.
      std::uint8_t* result = streams ? stream_.scratch(2 * length) : memory;
      reducer_.run(result, length);
      out_.write(at, length, result);
      if (streams) copyStreaming(memory, result, length);
    }
    stream_.consume(input);
    stream_.publish(segment);
    return segment;
  }

  void copyPieces(std::size_t s, const Segment& segment) {
    for (int i = 1; i < stream_.size(); ++i) {
      const int peer = (stream_.rank() + i) % stream_.size();
      const std::uint8_t* memory = stream_.await(peer, segment);
      // Meanwhile the piece that this rank reduces next comes from memory.
      Ahead next = i == 1 ? ahead(s + 2, stream_.rank()) : Ahead();
      constexpr std::size_t kBlock = 4096;
      for (std::size_t at = 0; at < bytes(s, peer); at += kBlock) {
        next.fetch(kBlock);
        out_.write(offset(s, peer) + at, std::min(kBlock, bytes(s, peer) - at), memory + at);
      }
    }
    stream_.consume(segment);
  }

  Ahead ahead(std::size_t s, int rank) const {
    if (!fetches_ || s >= segments_) return {};
    return {in_.contiguous(offset(s, rank), bytes(s, rank)), bytes(s, rank)};
  }

  SegmentStream& stream_;
  const Message& in_;
  const Message& out_;
  SegmentReducer reducer_;
  const std::size_t element_;
  const std::size_t perSegment_;  // elements
  const std::size_t total_;       // elements
  const std::size_t segments_;
  const bool fetches_;  // ahead: the message does not fit into the caches
};

}  // namespace

void segmentedAllReduce(SegmentStream& stream, const Request& request, const TuningTable& tuning) {
  const Message& in = request.in[0];
  const std::uint8_t* data = in.contiguous(0, in.bytes());
  const bool mayBeDirect = in.bytes() >= tuning.directAllReduceBytes;
  Arrival arrival = request.arrival();
  if (mayBeDirect && data == request.out[0].contiguous(0, in.bytes())) {
    arrival.direct = directOffset(stream, request.in);
  }
  stream.begin(arrival, request.expectedCount, nullptr, request.deadline, request.timeout);
  if (mayBeDirect && directAllReduce(stream, request, tuning, arrival.direct)) return;
  Pipeline(stream, request, tuning).run();
}

}  // namespace fastcoll
