// A pool of threads for asynchronous work. A group takes a thread while it has such work and
// returns it afterwards. A group owns no thread, and never waits for a thread that another group
// holds.
#pragma once

#include <functional>

#include "base/exported.hpp"

namespace fastcoll {

/// Runs `job` on a pooled thread; starts one if none is idle. Idle threads end by themselves.
FASTCOLL_EXPORTED void runOnWorker(std::function<void()> job);

/// Called after the process's last group has ended. Threads then end as soon as they are idle, not
/// after 2 s. Does not wait for them, because the caller may hold the GIL.
void dismissWorkers() noexcept;

/// Called at exit. Waits until the pool's threads have ended, 1 s at most. Does nothing on a pooled
/// thread.
void drainWorkers() noexcept;

}  // namespace fastcoll
