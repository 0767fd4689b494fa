// All-reduce by reduce-scatter and all-gather, pipelined over segments that stay in cache.
//
// Phases, for each segment s: every rank publishes the pieces that its peers reduce; each rank
//         reduces its own piece and writes the result to its output; it also writes the result over
//         the operand that it has read in each peer's segment; once all peers have consumed the
//         segment, its owner copies the other ranks' results from it.
// Order:  publish 0 | publish s+1, reduce s, copy s-1 | ... The look-ahead of one segment hides the
//         wait for the peers.
// Steps: 2 per segment. Bytes read per rank: (n - 1) B / n from its peers' rings, where it writes
//         as much; (n - 1) B / n from its own ring. Chosen: above the one-shot limit.
//
// A line of the ring goes to the peer and returns, so it is in its owner's cache at the next write.
// A result published in a separate ring would cost another line, which takes long between cores
// that share no cache.
#include "cpu/algorithms/pipeline.hpp"
#include "cpu/algorithms/segment_reduce.hpp"

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
        perSegment_(limit(tuning)),
        total_(in_.bytes() / element_),
        segments_(ceilDiv(total_, perSegment_)) {}

  void run() {
    pipeline(
        segments_, [this](std::size_t s) { return publishInput(s); },
        [this](std::size_t s, const Segment& segment) { reducePiece(s, segment); },
        [this](std::size_t s, const Segment& segment) { copyResults(s, segment); });
    stream_.end();
  }

 private:
  /// Most elements of a segment. A rank's own piece does not go through its ring; the other pieces
  /// may fill a whole segment of the ring. Longer ones would overlap results not copied yet.
  std::size_t limit(const TuningTable& tuning) const {
    const std::size_t ranks = stream_.size();
    const std::size_t inRing = segmentLimit(stream_, tuning, in_.bytes()) / element_;
    const std::size_t piece = inRing / (ranks - 1) / 64 * 64;  // as pieceOf rounds
    return std::max(inRing, std::min(ranks * piece, tuning.segmentBytes / element_));
  }
  std::size_t elements(std::size_t s) const {
    return std::min(perSegment_, total_ - s * perSegment_);
  }
  Piece piece(std::size_t s, int rank) const { return pieceOf(elements(s), stream_.size(), rank); }
  /// Offset of the piece in the message, in bytes.
  std::size_t offset(std::size_t s, int rank) const {
    return (s * perSegment_ + piece(s, rank).start) * element_;
  }
  std::size_t bytes(std::size_t s, int rank) const { return piece(s, rank).count * element_; }
  /// Offset of the piece for `to` in the segment of `owner`, which has all pieces but the owner's.
  std::size_t place(std::size_t s, int owner, int to) const {
    const std::size_t skipped = to > owner ? piece(s, owner).count : 0;
    return (piece(s, to).start - skipped) * element_;
  }

  Segment publishInput(std::size_t s) {
    // Pieces never grow with the rank, so the last rank leaves out the least.
    const std::size_t most = elements(s) - piece(s, stream_.size() - 1).count;
    const Segment segment = stream_.reserve(most * element_, true);
    const auto write = [&](std::uint8_t* memory, bool streaming) {
      for (const int to : stream_.others()) {
        in_.read(offset(s, to), bytes(s, to), memory + place(s, stream_.rank(), to), streaming);
      }
      return (elements(s) - piece(s, stream_.rank()).count) * element_;
    };
    stream_.fill(segment, write, true);
    stream_.publish(segment);
    return segment;
  }

  void reducePiece(std::size_t s, const Segment& segment) {
    const std::size_t length = bytes(s, stream_.rank());
    const std::size_t at = offset(s, stream_.rank());
    operands_.clear();
    for (const int peer : stream_.others()) {
      operands_.push_back(stream_.await(peer, segment) + place(s, peer, stream_.rank()));
      reducer_.source(peer, operands_.back());
    }
    reducer_.ownSource(stream_.rank(), in_, at, length);
    if (length > 0) {
      std::uint8_t* direct = out_.contiguous(at, length);
      std::uint8_t* result = direct != nullptr ? direct : SegmentReducer::scratch(2 * length);
      reducer_.digest(at, 0, length);
      reducer_.run(result, length, operands_);
      if (direct == nullptr) out_.write(at, length, result);
    }
    stream_.consume(segment);
  }

  void copyResults(std::size_t s, const Segment& segment) {
    const std::uint8_t* memory = stream_.awaitConsumed(segment);
    for (const int peer : stream_.others()) {
      out_.write(offset(s, peer), bytes(s, peer), memory + place(s, stream_.rank(), peer));
    }
  }

  SegmentStream& stream_;
  const Message& in_;
  const Message& out_;
  SegmentReducer reducer_;
  const std::size_t element_;
  const std::size_t perSegment_;  // elements
  const std::size_t total_;       // elements
  const std::size_t segments_;
  std::vector<std::uint8_t*> operands_;  // of the present piece, in the peers' rings
};

}  // namespace

void segmentedAllReduce(SegmentStream& stream, const Request& request, const TuningTable& tuning) {
  if (directAllReduce(stream, request, tuning)) return;
  Pipeline(stream, request, tuning).run();
}

}  // namespace fastcoll
