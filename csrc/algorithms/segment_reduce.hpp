// What the reducing algorithms share: one call of the kernel over a piece of a segment, from the
// memory of all ranks in rank order.
#pragma once

#include <vector>

#include "../reduce/reduce.hpp"
#include "algorithm.hpp"

namespace fastcoll {

class SegmentReducer {
 public:
  SegmentReducer(const Request& request, int ranks)
      : kernel_(reduceFunction(request.dtype, request.op)),
        element_(elementSize(request.dtype)),
        factor_(request.factor),
        sources_(static_cast<std::size_t>(ranks)) {}

  /// Address of the piece in rank `rank`'s contribution.
  void source(int rank, const void* piece) { sources_[static_cast<std::size_t>(rank)] = piece; }
  /// The own contribution is read where it lies, unless it is scattered over tensors.
  void ownSource(SegmentStream& stream, const Message& in, std::size_t offset, std::size_t bytes) {
    const std::uint8_t* own = in.contiguous(offset, bytes);
    if (own == nullptr) {
      // Behind the part of the scratch memory that may receive the result.
      std::uint8_t* spare = stream.scratch(2 * bytes) + bytes;
      in.read(offset, bytes, spare);
      own = spare;
    }
    source(stream.rank(), own);
  }

  /// Writes the result to [offset, offset + bytes) of a message.
  void runInto(const Message& out, std::size_t offset, std::size_t bytes,
               SegmentStream& stream) const {
    if (bytes == 0) return;
    std::uint8_t* direct = out.contiguous(offset, bytes);
    std::uint8_t* result = direct != nullptr ? direct : stream.scratch(2 * bytes);
    run(result, bytes);
    if (direct == nullptr) out.write(offset, bytes, result);
  }

  /// Writes the result to `out`, and to `copy` while it is in the first-level cache.
  void runTwice(std::uint8_t* out, std::uint8_t* copy, std::size_t bytes, Ahead ahead) {
    constexpr std::size_t kBlock = 4096;  // bytes; a multiple of every element
    const std::vector<const void*> first = sources_;
    for (std::size_t at = 0; at < bytes; at += kBlock) {
      const std::size_t length = std::min(kBlock, bytes - at);
      ahead.fetch(length);
      for (std::size_t i = 0; i < first.size(); ++i) {
        sources_[i] = static_cast<const std::uint8_t*>(first[i]) + at;
      }
      run(out + at, length);
      std::memcpy(copy + at, out + at, length);
    }
    sources_ = first;
  }

  void run(void* out, std::size_t bytes) const {
    ReduceArgs args{};
    args.dst = out;
    args.srcs = sources_.data();
    args.k = static_cast<int>(sources_.size());
    args.count = bytes / element_;
    args.factor = factor_;
    args.divisor = static_cast<double>(sources_.size());
    kernel_(args);
  }

 private:
  ReduceFn kernel_;
  std::size_t element_;
  double factor_;
  std::vector<const void*> sources_;
};

}  // namespace fastcoll
