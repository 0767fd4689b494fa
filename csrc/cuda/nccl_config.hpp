// Settings of NCCL's communicators that a user may change: fields of ncclConfig_t, under the names
// of torch's NCCLConfig. NCCL chooses unset fields, and its environment variables win.
// fastcoll/cuda/nccl_config.py passes them to NCCL.
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
