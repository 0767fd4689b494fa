// The end of c10d::Work::wait, which every wait() that overrides it must have too.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace fastcoll {

/// Takes a work out of the list of those that torch's wait_tensor() has still to wait for.
inline void unregisterWork(c10d::Work& work) {
  if (!c10d::allow_inflight_collective_as_graph_input()) return;
  c10d::unregister_work(c10::intrusive_ptr<c10d::Work>::unsafe_reclaim_from_nonowning(&work));
}

}  // namespace fastcoll
