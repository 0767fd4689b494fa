// Turns a collective of the process group into operations of the library, with no copy of ours.
// Pieces that are not consecutive in memory become separate operations, issued together.
#pragma once

#include <vector>

#include "cpu/algorithms/algorithm.hpp"
#include "torch/device_engine.hpp"

namespace fastcoll {

/// Appends the operations of `request` on this rank:
///
///   all_reduce, broadcast, reduce   the same, for each piece
///   all_gather                      one tensor: the same; a list: a broadcast from each rank
///   reduce_scatter                  one tensor: the same; a list: a reduce to each rank
///   gather, scatter, all_to_all     send and recv with each rank, itself included
///   send, recv                      the same, for each piece
void planOnDevice(const Request& request, int rank, std::vector<DeviceRequest>& into);

}  // namespace fastcoll
