// A batch: the calls of one thread from startCoalescing() to endCoalescing().
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "calls/call.hpp"

namespace fastcoll {

class Batch {
 public:
  /// Calls of the CPU, which have begun, and those of a device, which begin as one.
  struct Calls {
    std::vector<c10::intrusive_ptr<c10d::Work>> begun;
    std::vector<CallRef> onDevice;
  };

  void begin() {
    const std::lock_guard<std::mutex> lock(mutex_);
    thread_ = std::this_thread::get_id();
    calls_ = {};
  }
  /// Whether this thread's calls are collected. A thread looks for its own id without the lock.
  bool collects() const { return thread_.load() == std::this_thread::get_id(); }
  void add(c10::intrusive_ptr<c10d::Work> begun) {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls_.begun.push_back(std::move(begun));
  }
  void add(CallRef onDevice) {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls_.onDevice.push_back(std::move(onDevice));
  }
  Calls end() {
    const std::lock_guard<std::mutex> lock(mutex_);
    thread_ = std::thread::id();
    return std::exchange(calls_, {});
  }

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> thread_{std::thread::id()};
  Calls calls_;
};

}  // namespace fastcoll
