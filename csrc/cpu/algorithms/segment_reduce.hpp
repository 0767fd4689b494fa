// Common to the reducing algorithms: one kernel call over a piece of a segment, from the memory of
// all ranks. If the request needs the squares of the result, they are summed block by block while
// the result is in the first-level cache. The sums of the blocks are added in the blocks' order, so
// no bit depends on the number of threads.
//
// A reducer has the addresses of one piece. To reduce pieces on several threads at once, copy it,
// but not if the request needs squares or digests: they are added to one place.
#pragma once

#include <vector>

#include "cpu/algorithms/algorithm.hpp"
#include "reduce/digest.hpp"

namespace fastcoll {

class SegmentReducer {
 public:
  SegmentReducer(const Request& request, int ranks)
      : result_(request.outputFloat32 ? DType::Float32 : request.dtype),
        kernel_(request.kernel != nullptr && !request.outputFloat32
                    ? request.kernel
                    : reduceFunction(result_, request.op)),
        cast_(request.outputFloat32 ? &wireCast(request.dtype) : nullptr),
        element_(elementSize(request.dtype)),
        widening_(elementSize(result_) / element_),
        factor_(request.factor),
        squares_(request.squares),
        squaresOf_(squares_ == nullptr ? nullptr : squaresFunction(result_)),
        digests_(request.operandDigests),
        sources_(ranks) {}

  /// Bytes of the result per byte of a source.
  std::size_t widening() const { return widening_; }

  /// Digests `bytes` of each source, from `at` on; the piece is at `offset` of its message. Call it
  /// before the piece is reduced, because the result may replace a source.
  void digest(std::size_t offset, std::size_t at, std::size_t bytes) const {
    if (digests_ == nullptr) return;
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      const auto* const piece = static_cast<const std::uint8_t*>(sources_[i]) + at;
      digests_[i] += digestOf(offset + at, piece, bytes);
    }
  }
  /// Digests this rank's share of sources that all ranks read: `bytes` of each. From now on
  /// runInto() digests nothing and sums no squares.
  void shareWith(std::size_t bytes, int rank) {
    squares_ = nullptr;
    if (digests_ == nullptr) return;
    const Piece mine = pieceOf(bytes / element_, static_cast<int>(sources_.size()), rank);
    digest(0, mine.start * element_, mine.count * element_);
    digests_ = nullptr;
  }
  /// Adds the squares of this rank's share of a result that all ranks have, if the request needs
  /// them. The result was reduced from `bytes` of each source.
  void measureShare(const Request& request, const std::uint8_t* result, std::size_t bytes,
                    int rank) const {
    const Piece mine = pieceOf(bytes / element_, static_cast<int>(sources_.size()), rank);
    if (request.squares == nullptr || mine.count == 0) return;
    const std::size_t size = element_ * widening_;
    *request.squares += squared(result + mine.start * size, mine.count * size);
  }

  /// Address of the piece in rank `rank`'s contribution.
  void source(int rank, const void* piece) { sources_[rank] = piece; }
  /// Reads the own contribution in place, unless it is scattered over tensors.
  void ownSource(int rank, const Message& in, std::size_t offset, std::size_t bytes) {
    const std::uint8_t* own = in.contiguous(offset, bytes);
    if (own == nullptr) {
      // Use the scratch memory behind the part that may receive the result.
      std::uint8_t* spare = scratch((widening_ + 1) * bytes) + widening_ * bytes;
      in.read(offset, bytes, spare);
      own = spare;
    }
    source(rank, own);
  }

  /// Reduces `bytes` of each source, at `offset` of the sources' message, and writes the result to
  /// its place in `out`. Returns the address of the reduced bytes, in `out` or in scratch memory.
  const std::uint8_t* runInto(const Message& out, std::size_t offset, std::size_t bytes) const {
    if (bytes == 0) return nullptr;
    digest(offset, 0, bytes);
    const std::size_t at = offset * widening_, length = bytes * widening_;
    std::uint8_t* direct = out.contiguous(at, length);
    std::uint8_t* result = direct != nullptr ? direct : scratch(length + bytes);
    run(result, bytes);
    if (direct == nullptr) out.write(at, length, result);
    return result;
  }

  /// Writes the result to `out`, and to each of `copies` while it is in the first-level cache. Each
  /// of them may be a source.
  void run(std::uint8_t* out, std::size_t bytes,
           const std::vector<std::uint8_t*>& copies = {}) const {
    const bool whole = squares_ == nullptr && cast_ == nullptr && copies.empty();
    if (whole && bytes <= kBlock) return reduce(sources_, bytes, out, nullptr);
    const std::size_t block = whole ? bytes : kBlock;
    std::vector<double> sums(squares_ == nullptr ? 0 : ceilDiv(bytes, kBlock));
    Helpers::inChunks(bytes, [&](std::size_t begin, std::size_t end) {
      Lists* const lists = whole && begin == 0 ? nullptr : &listsOfThread();
      for (std::size_t at = begin; at < end; at += block) {
        const std::size_t length = std::min(block, end - at);
        std::uint8_t* const to = out + at * widening_;
        const Sources& sources = lists == nullptr ? sources_ : sourcesAt(at, length, *lists);
        reduce(sources, length, to, copies.empty() ? nullptr : copies[0] + at);
        for (std::size_t i = 1; i < copies.size(); ++i) std::memcpy(copies[i] + at, to, length);
        if (squares_ != nullptr) sums[at / kBlock] = squared(to, length * widening_);
      }
    });
    for (const double sum : sums) *squares_ += sum;
  }

  /// Memory of this thread, until its next call.
  static std::uint8_t* scratch(std::size_t bytes) {
    static thread_local std::vector<std::uint8_t> memory;
    if (memory.size() < bytes) memory.resize(bytes);
    return memory.data();
  }

 private:
  using Sources = std::vector<const void*>;

  void reduce(const Sources& sources, std::size_t bytes, std::uint8_t* out,
              std::uint8_t* copy) const {
    ReduceArgs args{};
    args.dst = out;
    args.copy = copy;
    args.srcs = sources.data();
    args.k = static_cast<int>(sources.size());
    args.count = bytes / element_;
    args.factor = factor_;
    args.divisor = static_cast<double>(sources.size());
    kernel_(args);
  }

  /// Room of a thread for the sources of a block, and their elements in the result's dtype.
  struct Lists {
    Sources sources;
    std::vector<std::uint8_t> rows;
  };
  Lists& listsOfThread() const {
    static thread_local Lists lists;
    lists.sources.resize(sources_.size());
    if (cast_ != nullptr) lists.rows.resize(sources_.size() * kBlock * widening_);
    return lists;
  }

  /// The sources from `at` on, in the result's dtype.
  const Sources& sourcesAt(std::size_t at, std::size_t bytes, Lists& lists) const {
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      const void*& source = lists.sources[i];
      source = static_cast<const std::uint8_t*>(sources_[i]) + at;
      if (cast_ == nullptr) continue;
      std::uint8_t* const row = lists.rows.data() + i * kBlock * widening_;
      cast_->widen(row, source, bytes / element_);
      source = row;
    }
    return lists.sources;
  }

  double squared(const std::uint8_t* result, std::size_t bytes) const {
    // A complex number's parts are squared one by one.
    return squaresOf_(result, bytes / elementSize(partOf(result_)));
  }

  // Bytes of a source; a multiple of every element. No block is cut between two threads.
  static constexpr std::size_t kBlock = Helpers::kUnit;

  DType result_;
  ReduceFn kernel_;
  const WireCast* cast_;  // for sources that are narrower than the result
  std::size_t element_;   // bytes of a source's element
  std::size_t widening_;
  double factor_;
  double* squares_;
  SquaresFn squaresOf_;
  std::uint64_t* digests_;
  Sources sources_;
};

}  // namespace fastcoll
