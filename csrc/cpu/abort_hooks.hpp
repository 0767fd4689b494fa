// User functions that a failing group calls before it raises its errors, to inspect its state
// (c10d::Backend::registerAbortHook).
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace fastcoll {

/// The hooks of one group. They run once, at its first fault, with no lock held.
class AbortHooks : public std::enable_shared_from_this<AbortHooks> {
 public:
  using Hook = std::function<void()>;
  /// A hook that is added after the first fault is never called.
  void add(std::int64_t id, Hook hook);
  void remove(std::int64_t id);
  /// Removes all hooks at the end of the group: a hook may hold the group, which holds its hooks.
  void clear();

  /// Each thread calls this before it raises a fault. The first thread runs the hooks. The others
  /// wait until the hooks end, for 10 s at most. A hook's exception is logged.
  void call() noexcept;
  /// The same for a thread that must not wait for the GIL: a pooled thread runs the hooks, and this
  /// one waits for 2 s at most.
  void callElsewhere() noexcept;

 private:
  enum class Phase { Waiting, Running, Done };
  void awaitEnd(std::unique_lock<std::mutex>& lock, std::chrono::seconds most);

  std::mutex mutex_;
  std::condition_variable ended_;
  // Never destroy a hook under the mutex: it may be a Python object, which needs the GIL.
  std::map<std::int64_t, Hook> hooks_;
  Phase phase_ = Phase::Waiting;
  std::thread::id runner_;
};

}  // namespace fastcoll
