// Selects the algorithm by pure functions of values that are equal on all ranks.
#pragma once

#include <cstddef>

#include "cpu/algorithms/algorithm.hpp"

namespace fastcoll {

enum class AllReduceAlgorithm : std::uint8_t {
  OneShot,    // every rank reads all messages at once
  Segmented,  // reduce-scatter and all-gather in a pipeline of segments
};

AllReduceAlgorithm selectAllReduce(const TuningTable& tuning, std::size_t bytes, int ranks,
                                   std::size_t ringBytes);

}  // namespace fastcoll
