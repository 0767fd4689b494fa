// What a user may set of NCCL's communicators: the fields of NCCL's ncclConfig_t, under the names
// that torch's NCCLConfig gives them. What is not set is NCCL's choice, and its environment
// variables win. fastcoll/cuda/nccl_config.py hands them over.
#pragma once

#include <optional>
#include <string>

namespace fastcoll {

struct NcclConfig {
  std::optional<int> cgaClusterSize, minCtas, maxCtas, splitShare, trafficClass, collnetEnable,
      ctaPolicy, shrinkShare, nvlsCtas, channelsPerNetPeer, nvlinkCentricSched;
  std::optional<std::string> netName, commName;
};

}  // namespace fastcoll
