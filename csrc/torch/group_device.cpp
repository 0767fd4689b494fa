#include "torch/group_device.hpp"

#include "base/weak_registry.hpp"

namespace fastcoll {
namespace {

struct Devices {
  std::atomic<const DeviceEngineMaker*> make{nullptr};
  std::function<void()> load;
};

Devices& devices() {
  static auto* all = new Devices;  // outlives static destructors
  return *all;
}

}  // namespace

void setDeviceEngineMaker(DeviceEngineMaker maker) {
  const DeviceEngineMaker* none = nullptr;
  auto* const made = new DeviceEngineMaker(std::move(maker));  // kept: other threads may call it
  if (!devices().make.compare_exchange_strong(none, made)) delete made;
}

void setDeviceLoader(std::function<void()> load) {
  devices().load = std::move(load);
}

DeviceEngine& GroupDevice::engine(c10::DeviceType type) {
  if (forkGeneration_ != forkGeneration()) {  // before any lock: a fork may inherit a held one
    throw Error(ErrorKind::Backend, errorSite("init", group_), kForked);
  }
  const std::lock_guard<std::mutex> making(making_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    throwIfOver();
    if (engine_ != nullptr) return *engine_;
  }
  if (devices().make == nullptr) devices().load();  // by import, so once, whatever thread comes
  group_.device = type;
  auto made = (*devices().make)(group_);
  registryOf<DeviceEngine>().add(made);
  const std::lock_guard<std::mutex> lock(mutex_);
  throwIfOver();  // it may have ended meanwhile
  engine_ = std::move(made);
  isMade_.store(true, std::memory_order_release);
  return *engine_;
}

std::shared_ptr<DeviceEngine> GroupDevice::last(const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (over_.empty()) over_ = why;
  return engine_;
}

/// Called under the lock.
void GroupDevice::throwIfOver() const {
  if (over_.empty()) return;
  throw Error(ErrorKind::Backend, errorSite("init", group_), over_, kInitAgain);
}

}  // namespace fastcoll
