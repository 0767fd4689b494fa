// From a collective, as the process group describes it, to the operations of the library that do it
// without a copy of ours: pieces that do not follow each other in memory go one by one, together.
#pragma once

#include <vector>

#include "../algorithms/algorithm.hpp"
#include "device_request.hpp"

namespace fastcoll {

/// Appends the operations of `request` on this rank:
///
///   all_reduce, broadcast, reduce   the same, for each piece
///   all_gather                      the same into one tensor; into a list each rank's broadcast
///   reduce_scatter                  the same from one tensor; from a list a reduce to each rank
///   gather, scatter, all_to_all     send and recv with each rank, this one among them
///   send, recv                      the same, for each piece
void planOnDevice(const Request& request, int rank, std::vector<DeviceRequest>& into);

}  // namespace fastcoll
