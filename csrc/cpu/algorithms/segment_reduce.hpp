// Common to the reducing algorithms: one kernel call over a piece of a segment, from the memory of
// all ranks. If the request needs the squares of the result, they are summed block by block while
// the result is in the first-level cache.
#pragma once

#include <vector>

#include "cpu/algorithms/algorithm.hpp"

namespace fastcoll {

class SegmentReducer {
 public:
  using Sources = std::vector<const void*>;

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
    const auto chunk = [&](std::size_t begin, std::size_t end) {
      inBlocks(begin, end, [&](const Sources& sources, std::size_t at, std::size_t length) {
        reduce(sources, out + at, length, copies[0] + at);
        for (std::size_t i = 1; i < copies.size(); ++i) {
          std::memcpy(copies[i] + at, out + at, length);
        }
      });
    };
    squares_ == nullptr ? Helpers::inChunks(bytes, chunk) : chunk(0, bytes);
  }

  void run(std::uint8_t* out, std::size_t bytes) {
    if (squares_ == nullptr && cast_ == nullptr) {
      return Helpers::inChunks(bytes, [&](std::size_t begin, std::size_t end) {
        if (begin == 0) return reduce(sources_, out, end);
        reduce(advanced(begin), out + begin, end - begin);
      });
    }
    inBlocks(0, bytes, [&](const Sources& sources, std::size_t at, std::size_t length) {
      reduce(cast_ == nullptr ? sources : widened(sources, length), out + at * widening_, length);
    });
  }

 private:
  /// Calls reduceBlock(sources, at, length), with the sources from `at` on.
  template <typename ReduceBlock>
  void inBlocks(std::size_t begin, std::size_t end, ReduceBlock reduceBlock) {
    Sources sources = advanced(begin);
    for (std::size_t at = begin; at < end; at += kBlock) {
      reduceBlock(sources, at, std::min(kBlock, end - at));
      advance(sources, kBlock);
    }
  }

  static void advance(Sources& sources, std::size_t bytes) {
    for (const void*& source : sources) source = static_cast<const std::uint8_t*>(source) + bytes;
  }
  Sources advanced(std::size_t bytes) const {
    Sources sources = sources_;
    advance(sources, bytes);
    return sources;
  }

  const Sources& widened(const Sources& sources, std::size_t bytes) {
    wide_.resize(sources.size());
    for (std::size_t i = 0; i < sources.size(); ++i) {
      std::uint8_t* row = rows_.data() + i * kBlock * widening_;
      cast_->widen(row, sources[i], bytes / element_);
      wide_[i] = row;
    }
    return wide_;
  }

  void reduce(const Sources& sources, std::uint8_t* out, std::size_t bytes,
              std::uint8_t* copy = nullptr) const {
    ReduceArgs args{};
    args.dst = out;
    args.copy = copy;
    args.srcs = sources.data();
    args.k = static_cast<int>(sources.size());
    args.count = bytes / element_;
    args.factor = factor_;
    args.divisor = static_cast<double>(sources.size());
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
  Sources sources_;
  Sources wide_;
  std::vector<std::uint8_t> rows_;  // a block of each source, as float32
};

}  // namespace fastcoll
