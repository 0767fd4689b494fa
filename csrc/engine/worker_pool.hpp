// Threads for groups that have asynchronous work: taken when there is some, given back when there
// is none. A group has no thread of its own, and no group ever waits for a thread that another one
// holds.
#pragma once

#include <functional>

namespace fastcoll {

/// Runs `job` on a pooled thread, starting one if none is idle. Idle threads end by themselves.
void runOnWorker(std::function<void()> job);

/// Lets threads end as soon as they are idle rather than after two seconds, and waits for none: the
/// process's last group is gone, and the caller may hold the GIL.
void dismissWorkers() noexcept;

/// Waits until the pool's threads have ended, at most a second: at exit. Does nothing on a pooled
/// thread.
void drainWorkers() noexcept;

}  // namespace fastcoll
