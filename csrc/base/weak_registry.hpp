// The only object of a type in this process, and the list of all living ones, for the code at exit.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fork.hpp"

namespace fastcoll {

/// This process's only T. A forked child makes its own, because the parent's mutexes may have been
/// held at the fork. It is never destroyed, because threads may still use it at the end.
template <typename T>
T& perProcess() {
  struct State {
    const std::uint64_t generation = forkGeneration();
    T one;
  };
  static std::atomic<State*> state{nullptr};
  State* now = state.load(std::memory_order_acquire);
  if (now == nullptr || now->generation != forkGeneration()) {
    auto* fresh = new State;
    if (state.compare_exchange_strong(now, fresh, std::memory_order_acq_rel)) return fresh->one;
    delete fresh;
  }
  return now->one;
}

/// Holds weak pointers. A forked child sees none of its parent's objects.
template <typename T>
class WeakRegistry {
 public:
  void add(const std::shared_ptr<T>& one) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(all_, [](const auto& weak) { return weak.expired(); });
    all_.push_back(one);
  }

  std::vector<std::shared_ptr<T>> all() {
    std::vector<std::shared_ptr<T>> found;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& weak : all_) {
      if (auto one = weak.lock()) found.push_back(std::move(one));
    }
    return found;
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<T>> all_;
};

/// The registry of all T.
template <typename T>
WeakRegistry<T>& registryOf() {
  return perProcess<WeakRegistry<T>>();
}

}  // namespace fastcoll
