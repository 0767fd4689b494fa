// The collectives and messages that every engine knows, and their names.
#pragma once

#include <cstdint>

namespace fastcoll {

enum class Collective : std::uint8_t {
  AllReduce,
  Broadcast,
  Reduce,
  AllGather,
  Gather,
  Scatter,
  ReduceScatter,
  AllToAll,
  Barrier,
  Send,
  Recv,
};

/// torch.distributed's name: "all_reduce".
const char* collectiveName(Collective collective);

}  // namespace fastcoll
