// Extensions of a group's timeouts that end by themselves (c10d::Backend::addEphemeralTimeout).
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>

namespace fastcoll {

/// Adds an extension to the timeout of every later call, until the first of those calls has ended.
/// From any thread.
class TimeoutExtensions {
 public:
  using Milliseconds = std::chrono::milliseconds;
  /// Held by a call until it ends; nullptr: no extension ends with it.
  using Claim = std::shared_ptr<void>;

  void add(Milliseconds extension) {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->unclaimed += extension;
    state_->active = state_->active.load() + extension;
  }

  /// Extends the timeout of a call that is made now.
  Claim extend(Milliseconds& timeout) {
    if (state_->active.load(std::memory_order_relaxed) == Milliseconds(0)) return nullptr;
    const std::lock_guard<std::mutex> lock(state_->mutex);
    timeout += state_->active.load();
    const auto claimed = std::exchange(state_->unclaimed, Milliseconds(0));
    if (claimed == Milliseconds(0)) return nullptr;
    return Claim(state_.get(), [state = state_, claimed](void*) {
      const std::lock_guard<std::mutex> guard(state->mutex);
      state->active = state->active.load() - claimed;
    });
  }

 private:
  struct State {
    std::mutex mutex;
    std::atomic<Milliseconds> active{Milliseconds(0)};
    Milliseconds unclaimed{0};  // part of `active`; no call was made since
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

/// The terms of a call that its work keeps besides the tensors.
struct WorkTerms {
  std::chrono::milliseconds timeout{};
  bool timed = false;                  // after torch's enableCollectivesTiming()
  TimeoutExtensions::Claim extension;  // held until the call ends
};

}  // namespace fastcoll
