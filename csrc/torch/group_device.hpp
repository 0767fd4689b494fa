// The engine of a group's device tensors, made at the first of them: a group of CPU tensors loads
// no CUDA.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "base/fork.hpp"
#include "torch/device_engine.hpp"

namespace fastcoll {

class GroupDevice {
 public:
  /// `group.device` is set later.
  explicit GroupDevice(DeviceGroup group) : group_(std::move(group)) {}

  /// The engine; makes it if there is none. Throws Error(Backend) after last(), and in a fork.
  DeviceEngine& engine(c10::DeviceType type);
  /// nullptr: none was made.
  std::shared_ptr<DeviceEngine> made() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return engine_;
  }
  /// As made(). No engine can be made after this call; `why` is for the errors.
  std::shared_ptr<DeviceEngine> last(const std::string& why);
  bool isMade() const { return isMade_.load(std::memory_order_acquire); }

 private:
  void throwIfOver() const;

  DeviceGroup group_;
  const std::uint64_t forkGeneration_ = forkGeneration();
  std::mutex making_;  // taken before mutex_, which is free during calls of Python
  mutable std::mutex mutex_;
  std::shared_ptr<DeviceEngine> engine_;
  std::atomic<bool> isMade_{false};
  std::string over_;  // why no engine can be made any more
};

}  // namespace fastcoll
