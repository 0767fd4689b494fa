// All-reduce by reduce-scatter and all-gather, pipelined over segments that stay in cache.
//
// Phases, for each segment s: A(s) every rank publishes its part of the message; each rank reduces
// one
//         piece of it in rank order, writes it to its output and publishes it as B(s); every rank
//         copies the other ranks' pieces from B(s).
// Order:  publish A(0) | A(s+1), reduce A(s), publish B(s), copy B(s-1) | ... The look-ahead of one
//         segment hides the wait for the peers. Segments are published and consumed in one order:
//         A0 A1 B0 A2 B1 A3 B2 ... A(S-1) B(S-2) B(S-1).
// Steps: 2 per segment. Bytes read per rank: 2 (n - 1) B / n. Chosen: above the one-shot limit.
#include "algorithm.hpp"
#include "segment_reduce.hpp"

namespace fastcoll {
namespace {

class Pipeline {
 public:
  Pipeline(SegmentStream& stream, const Request& request)
      : stream_(stream),
        in_(request.in[0]),
        out_(request.out[0]),
        reducer_(request, stream.size()),
        element_(elementSize(request.dtype)),
        perSegment_(stream.segmentBytes() / element_),
        total_(in_.bytes() / element_),
        segments_(ceilDiv(total_, perSegment_)) {
    first_ = stream.begin(request.arrival(), stream.segmentBytes(), request.expectedCount, nullptr,
                          request.deadline, request.timeout);
  }

  void run() {
    publishInput(0);
    for (std::size_t s = 0; s < segments_; ++s) {
      if (s + 1 < segments_) publishInput(s + 1);
      reducePiece(s);
      if (s > 0) copyPieces(s - 1);
    }
    copyPieces(segments_ - 1);
    stream_.end(2 * segments_);
  }

 private:
  // Position of A(s) and B(s) in the stream; see "Order" above.
  std::uint64_t inputSegment(std::size_t s) const { return first_ + (s == 0 ? 0 : 2 * s - 1); }
  std::uint64_t resultSegment(std::size_t s) const {
    return first_ + (s + 1 < segments_ ? 2 * s + 2 : 2 * s + 1);
  }
  std::size_t elements(std::size_t s) const {
    return std::min(perSegment_, total_ - s * perSegment_);
  }
  Piece piece(std::size_t s, int rank) const { return pieceOf(elements(s), stream_.size(), rank); }

  void publishInput(std::size_t s) {
    const std::uint64_t segment = inputSegment(s);
    std::uint8_t* slot = stream_.acquire(segment);
    const std::size_t offset = s * perSegment_ * element_;
    const Piece mine = piece(s, stream_.rank());
    // Nobody else reads the piece that this rank reduces: it is taken from the message itself when
    // it lies there in one run.
    if (in_.contiguous(offset + mine.start * element_, mine.count * element_) != nullptr) {
      const std::size_t end = mine.start + mine.count;
      in_.read(offset, mine.start * element_, slot);
      in_.read(offset + end * element_, (elements(s) - end) * element_, slot + end * element_);
    } else {
      in_.read(offset, elements(s) * element_, slot);
    }
    stream_.publish(segment);
    slots_[s % 2] = slot;
  }

  void reducePiece(std::size_t s) {
    const Piece mine = piece(s, stream_.rank());
    const std::size_t offset = (s * perSegment_ + mine.start) * element_;
    const std::size_t bytes = mine.count * element_;
    for (int step = 0; step < stream_.size(); ++step) {
      const int peer = (stream_.rank() + step) % stream_.size();
      const std::uint8_t* source = nullptr;
      if (step == 0) {
        source = in_.contiguous(offset, bytes);
        if (source == nullptr) source = slots_[s % 2] + mine.start * element_;
      } else {
        source = stream_.await(peer, inputSegment(s)) + mine.start * element_;
      }
      reducer_.source(peer, source);
    }
    const std::uint64_t segment = resultSegment(s);
    std::uint8_t* slot = stream_.acquire(segment);
    if (bytes > 0) {
      std::uint8_t* direct = out_.contiguous(offset, bytes);
      if (direct != nullptr) {
        reducer_.run(direct, mine.count);
        std::memcpy(slot, direct, bytes);
      } else {
        reducer_.run(slot, mine.count);
        out_.write(offset, bytes, slot);
      }
    }
    stream_.consume(inputSegment(s));
    stream_.publish(segment);
  }

  void copyPieces(std::size_t s) {
    const std::uint64_t segment = resultSegment(s);
    for (int step = 1; step < stream_.size(); ++step) {
      const int peer = (stream_.rank() + step) % stream_.size();
      const std::uint8_t* slot = stream_.await(peer, segment);
      const Piece theirs = piece(s, peer);
      out_.write((s * perSegment_ + theirs.start) * element_, theirs.count * element_, slot);
    }
    stream_.consume(segment);
  }

  SegmentStream& stream_;
  const Message& in_;
  const Message& out_;
  SegmentReducer reducer_;
  const std::size_t element_;
  const std::size_t perSegment_;  // elements
  const std::size_t total_;       // elements
  const std::size_t segments_;
  std::uint64_t first_ = 0;
  const std::uint8_t* slots_[2] = {nullptr, nullptr};
};

}  // namespace

void segmentedAllReduce(SegmentStream& stream, const Request& request) {
  Pipeline(stream, request).run();
}

}  // namespace fastcoll
