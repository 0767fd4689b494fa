// What the reducing algorithms share: one call of the kernel over a piece of a segment, from the
// slots of all ranks in rank order.
#pragma once

#include <vector>

#include "../reduce/reduce.hpp"
#include "algorithm.hpp"

namespace fastcoll {

class SegmentReducer {
 public:
  SegmentReducer(const Request& request, int ranks)
      : kernel_(reduceFunction(request.dtype, request.op)),
        factor_(request.factor),
        sources_(static_cast<std::size_t>(ranks)) {}

  /// Address of the piece in rank `rank`'s contribution.
  void source(int rank, const void* piece) { sources_[static_cast<std::size_t>(rank)] = piece; }

  void run(void* out, std::size_t count) const {
    ReduceArgs args{};
    args.dst = out;
    args.srcs = sources_.data();
    args.k = static_cast<int>(sources_.size());
    args.count = count;
    args.factor = factor_;
    args.divisor = static_cast<double>(sources_.size());
    kernel_(args);
  }

 private:
  ReduceFn kernel_;
  double factor_;
  std::vector<const void*> sources_;
};

}  // namespace fastcoll
