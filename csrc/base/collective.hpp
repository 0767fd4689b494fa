// The collectives and point-to-point calls of every engine, and their names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

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
inline const char* collectiveName(Collective collective) {
  constexpr const char* kNames[] = {
      "all_reduce",     "broadcast",  "reduce",  "all_gather", "gather", "scatter",
      "reduce_scatter", "all_to_all", "barrier", "send",       "recv"};
  const auto number = static_cast<std::size_t>(collective);
  return number < std::size(kNames) ? kNames[number] : "unknown";
}

}  // namespace fastcoll
