// Which algorithm runs: pure functions of what is equal on all ranks.
#pragma once

#include <cstddef>

#include "algorithm.hpp"

namespace fastcoll {

/// Messages of at most this many bytes are reduced in one shot. Measured on a 2-core Zen 4 virtual
/// machine with 2 ranks; the tuning issue replaces it by a table per host.
struct SelectorTable {
  std::size_t oneShotAllReduceBytes = 32 * 1024;
};

Algorithm selectAllReduce(const SelectorTable& table, std::size_t bytes, int ranks,
                          std::size_t segmentBytes);

}  // namespace fastcoll
