// All living objects of one type in this process, so that the exit code can reach each of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fork.hpp"

namespace fastcoll {

/// One object in each process: a forked child makes its own, because the parent's mutexes may have
/// been held at the fork. Use it as a static that is never destroyed; its objects never are.
template <typename T>
class PerProcess {
 public:
  T& get() {
    State* now = state_.load(std::memory_order_acquire);
    if (now == nullptr || now->generation != forkGeneration()) {
      auto* fresh = new State;
      if (state_.compare_exchange_strong(now, fresh, std::memory_order_acq_rel)) return fresh->one;
      delete fresh;
    }
    return now->one;
  }

 private:
  struct State {
    const std::uint64_t generation = forkGeneration();
    T one;
  };
  std::atomic<State*> state_{nullptr};
};

/// This process's only T. It outlives static destructors, because threads may still use it then.
template <typename T>
T& perProcess() {
  static auto* one = new PerProcess<T>;
  return one->get();
}

/// Holds weak pointers. A forked child sees none of its parent's objects. Use it as a static that
/// is never destroyed.
template <typename T>
class WeakRegistry {
 public:
  void add(const std::shared_ptr<T>& one) {
    State& now = state_.get();
    const std::lock_guard<std::mutex> lock(now.mutex);
    std::erase_if(now.all, [](const auto& weak) { return weak.expired(); });
    now.all.push_back(one);
  }

  std::vector<std::shared_ptr<T>> all() {
    State& now = state_.get();
    std::vector<std::shared_ptr<T>> found;
    const std::lock_guard<std::mutex> lock(now.mutex);
    for (const auto& weak : now.all) {
      if (auto one = weak.lock()) found.push_back(std::move(one));
    }
    return found;
  }

 private:
  struct State {
    std::mutex mutex;
    std::vector<std::weak_ptr<T>> all;
  };
  PerProcess<State> state_;
};

/// The registry of all T. It outlives static destructors.
template <typename T>
WeakRegistry<T>& registryOf() {
  static auto* all = new WeakRegistry<T>;
  return *all;
}

}  // namespace fastcoll
