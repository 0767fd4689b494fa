// What the ranks of a host compare of their calls on device tensors (HostPeers::post): what NCCL
// and torch require to be equal on all ranks, and no more.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "calls/call.hpp"

namespace fastcoll {

struct ComparedCalls {
  Signature first;           // with the seq of this rank
  std::uint64_t others = 0;  // a hash of the rest
};

/// nullopt: messages alone, which not all ranks make.
std::optional<ComparedCalls> comparedOf(const std::vector<CallRef>& calls, std::uint64_t seq);

}  // namespace fastcoll
