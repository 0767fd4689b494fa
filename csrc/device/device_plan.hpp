// From a collective, as the process group describes it, to the operations of the library that do it
// without a copy of ours: pieces that do not follow each other in memory go one by one, together.
#pragma once

#include <vector>

#include "../algorithms/algorithm.hpp"
#include "device_request.hpp"

namespace fastcoll {

/// Appends the operations of `request` on this rank.
///
///   collective                   operations of the library
///   all_reduce, broadcast,       the same, for each piece
///   reduce
///   all_gather                   the same where the outputs follow each other; else each rank's
///   broadcast reduce_scatter               the same where the inputs follow each other; else a
///   reduce to each rank gather, scatter, all_to_all  send and recv with each rank, this one among
///   them send, recv                   the same, for each piece
void planOnDevice(const Request& request, int rank, std::vector<DeviceRequest>& into);

}  // namespace fastcoll
