// Which algorithm runs: pure functions of what is equal on all ranks.
#pragma once

#include <cstddef>

#include "algorithm.hpp"

namespace fastcoll {

enum class AllReduceAlgorithm : std::uint8_t {
  OneShot,    // everybody reads everything it needs at once
  Segmented,  // reduce-scatter and all-gather in a pipeline of segments
};

AllReduceAlgorithm selectAllReduce(const TuningTable& tuning, std::size_t bytes, int ranks,
                                   std::size_t ringBytes);

}  // namespace fastcoll
