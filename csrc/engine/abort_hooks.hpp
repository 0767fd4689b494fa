// What a user wants called when a group fails, to look at its state before the errors come
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

/// The hooks of one group. They are called once, at its first fault, and no lock is held meanwhile.
class AbortHooks : public std::enable_shared_from_this<AbortHooks> {
 public:
  using Hook = std::function<void()>;
  /// A hook that is added after they were called is never called.
  void add(std::int64_t id, Hook hook);
  void remove(std::int64_t id);
  /// Removes all, at the end of the group: a hook may hold the group, which holds its hooks.
  void clear();

  /// Each thread that is about to show a fault calls this. The first one runs the hooks; the others
  /// wait for their end, for ten seconds at most. What a hook throws is logged.
  void call() noexcept;
  /// The same for a thread that must not wait for Python's lock: a pooled thread runs the hooks,
  /// and this one waits for two seconds at most.
  void callElsewhere() noexcept;

 private:
  enum class Phase { Waiting, Running, Done };
  void awaitEnd(std::unique_lock<std::mutex>& lock, std::chrono::seconds most);

  std::mutex mutex_;
  std::condition_variable ended_;
  // None ends under the mutex: it may be a Python object, which needs Python's lock.
  std::map<std::int64_t, Hook> hooks_;
  Phase phase_ = Phase::Waiting;
  std::thread::id runner_;
};

}  // namespace fastcoll
