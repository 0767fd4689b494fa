// Common to the reducing algorithms: one kernel call over a piece of a segment, from the memory of
// all ranks. If the request needs the squares of the result, they are summed block by block while
// the result is in the first-level cache.
#pragma once

#include <vector>

#include "cpu/algorithms/algorithm.hpp"

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
        sources_(ranks),
        rows_(cast_ == nullptr ? 0 : sources_.size() * kBlock * widening_) {}

  /// Bytes of the result per byte of a source.
  std::size_t widening() const { return widening_; }

  /// From now on run() sums no squares. Use it for a result that other ranks reduce too.
  void measureNothing() { squares_ = nullptr; }
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
  void ownSource(SegmentStream& stream, const Message& in, std::size_t offset, std::size_t bytes) {
    const std::uint8_t* own = in.contiguous(offset, bytes);
    if (own == nullptr) {
      // Use the scratch memory behind the part that may receive the result.
      std::uint8_t* spare = stream.scratch((widening_ + 1) * bytes) + widening_ * bytes;
      in.read(offset, bytes, spare);
      own = spare;
    }
    source(stream.rank(), own);
  }

  /// Reduces `bytes` of each source, at `offset` of the sources' message, and writes the result to
  /// its place in `out`. Returns the address of the reduced bytes, in `out` or in scratch memory.
  const std::uint8_t* runInto(const Message& out, std::size_t offset, std::size_t bytes,
                              SegmentStream& stream) {
    if (bytes == 0) return nullptr;
    const std::size_t at = offset * widening_, length = bytes * widening_;
    std::uint8_t* direct = out.contiguous(at, length);
    std::uint8_t* result = direct != nullptr ? direct : stream.scratch(length + bytes);
    run(result, bytes);
    if (direct == nullptr) out.write(at, length, result);
    return result;
  }

  /// Writes the result to `out` and to each of `copies` (at least one) while it is in the
  /// first-level cache. Each of them may be a source.
  void runInto(std::uint8_t* out, const std::vector<std::uint8_t*>& copies, std::size_t bytes) {
    inBlocks(bytes, [&](std::size_t at, std::size_t length) {
      reduce(out + at, length, copies[0] + at);
      for (std::size_t i = 1; i < copies.size(); ++i) {
        std::memcpy(copies[i] + at, out + at, length);
      }
    });
  }

  void run(std::uint8_t* out, std::size_t bytes) {
    if (squares_ == nullptr && cast_ == nullptr) return reduce(out, bytes);
    inBlocks(bytes, [&](std::size_t at, std::size_t length) {
      if (cast_ != nullptr) widenSources(length);
      reduce(out + at * widening_, length);
    });
  }

 private:
  /// Calls reduceBlock(at, length) with the sources advanced by `at`.
  template <typename ReduceBlock>
  void inBlocks(std::size_t bytes, ReduceBlock reduceBlock) {
    const std::vector<const void*> first = sources_;
    for (std::size_t at = 0; at < bytes; at += kBlock) {
      for (std::size_t i = 0; i < first.size(); ++i) {
        sources_[i] = static_cast<const std::uint8_t*>(first[i]) + at;
      }
      reduceBlock(at, std::min(kBlock, bytes - at));
    }
    sources_ = first;
  }

  void widenSources(std::size_t bytes) {
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      std::uint8_t* row = rows_.data() + i * kBlock * widening_;
      cast_->widen(row, sources_[i], bytes / element_);
      sources_[i] = row;
    }
  }

  void reduce(std::uint8_t* out, std::size_t bytes, std::uint8_t* copy = nullptr) const {
    ReduceArgs args{};
    args.dst = out;
    args.copy = copy;
    args.srcs = sources_.data();
    args.k = static_cast<int>(sources_.size());
    args.count = bytes / element_;
    args.factor = factor_;
    args.divisor = static_cast<double>(sources_.size());
    kernel_(args);
    if (squares_ != nullptr) *squares_ += squared(out, bytes * widening_);
  }

  double squared(const std::uint8_t* result, std::size_t bytes) const {
    // A complex number's parts are squared one by one.
    return squaresOf_(result, bytes / elementSize(partOf(result_)));
  }

  static constexpr std::size_t kBlock = 4096;  // bytes of a source; a multiple of every element

  DType result_;
  ReduceFn kernel_;
  const WireCast* cast_;  // for sources that are narrower than the result
  std::size_t element_;   // bytes of a source's element
  std::size_t widening_;
  double factor_;
  double* squares_;
  SquaresFn squaresOf_;
  std::vector<const void*> sources_;
  std::vector<std::uint8_t> rows_;  // a block of each source, as float32
};

}  // namespace fastcoll
