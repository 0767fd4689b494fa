// Which algorithm runs between hosts: pure functions of values that are equal on all ranks.
//
// By the alpha-beta rule a step takes alpha + bytes * beta (Hockney, "The communication challenge
// for MPP", Parallel Computing 20, 1994). So one step less is worth alpha / beta bytes, which is
// TuningTable::linkBytes. tests/transport/test_host_selector.py has the formulas and checks this
// file against them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastcoll {

enum class HostBroadcast : std::uint8_t {
  Flat,              // the root's host sends all to each other host
  ScatterAllGather,  // it sends a part to each host, which forwards it to the others
  Chain,             // each host forwards chunks to the next one
};

HostBroadcast selectHostBroadcast(int hosts, std::size_t bytes, std::size_t linkBytes);

/// Whether a sum takes one step, in which each host sends all its partial results to all others.
/// Otherwise it takes two, a reduce-scatter and an all-gather. `partial`: bytes of partial results
/// of the host with the most of them. `result`: bytes of the result.
bool reducesInOneStep(int hosts, std::size_t partial, std::size_t result, std::size_t linkBytes);

}  // namespace fastcoll
