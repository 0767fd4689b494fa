// torch's list of works that compiled graphs wait for. While
// allow_inflight_collective_as_graph_input_ctx() is in force, torch lists what a call returns, and
// c10d::Work::wait removes it.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace fastcoll {

/// Whether each call must return a work: otherwise torch would list nullptr and wait for it.
inline bool listsWorks() {
  return c10d::allow_inflight_collective_as_graph_input();
}

/// Called at the end of every wait() that overrides torch's.
inline void unregisterWork(c10d::Work& work) {
  if (!listsWorks()) return;
  c10d::unregister_work(c10::intrusive_ptr<c10d::Work>::unsafe_reclaim_from_nonowning(&work));
}

}  // namespace fastcoll
