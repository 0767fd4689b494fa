// Threads for groups that have asynchronous work: taken when there is some, given back when there
// is none. A group has no thread of its own, and no group ever waits for a thread that another one
// holds.
#pragma once

#include <functional>

namespace fastcoll {

/// Runs `job` on a pooled thread, starting one if none is idle. Idle threads end by themselves.
void runOnWorker(std::function<void()> job);

/// Waits until the pool's idle threads have ended, at most a second: at exit, and when the
/// process's last group is gone. Does nothing on a pooled thread.
void drainWorkers() noexcept;

}  // namespace fastcoll
