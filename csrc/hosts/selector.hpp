// Which algorithm runs between hosts: pure functions of what is equal on all ranks.
//
// By the alpha-beta rule a step takes alpha + bytes * beta (Hockney, "The communication challenge
// for MPP", Parallel Computing 20, 1994). So one step less is worth alpha / beta bytes, which is
// TuningTable::linkBytes. tests/transport/test_host_selector.py has the formulas and holds this
// file to them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastcoll {

enum class HostBroadcast : std::uint8_t {
  Flat,              // the root's host sends each other all
  ScatterAllGather,  // it sends each other a part, which that passes on to the rest of them
  Chain,             // each host sends the next one chunk after chunk
};

HostBroadcast selectHostBroadcast(int hosts, std::size_t bytes, std::size_t linkBytes);

/// Whether a sum is made in one step, in which each host sends all that it has to all others; else
/// in two, a reduce-scatter and an all-gather. `partial`: bytes of partial results of the host that
/// has most of them; `result`: of the result.
bool reducesInOneStep(int hosts, std::size_t partial, std::size_t result, std::size_t linkBytes);

}  // namespace fastcoll
