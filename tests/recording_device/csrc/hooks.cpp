// The interface of an accelerator to torch, besides its device guard.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>

#include "launch.hpp"

namespace recording {
namespace {

// Random numbers come from the CPU generator: operators run on CPU, and the same seed gives the
// same model.
struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return narrow(currentDevice()); }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    recording::setCurrentDevice(device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return narrow(recording::setCurrentDevice(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return narrow(device < 0 ? currentDevice() : recording::setCurrentDevice(device));
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }

  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  c10::Device getDeviceFromPtr(void* address) const override {
    const int device = Recorder::get().deviceOf(address);
    TORCH_CHECK(device >= 0, address, " is no memory of a recording device");
    return {kType, narrow(device)};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resizeStorage(storage, bytes);
  }

 private:
  static c10::DeviceIndex narrow(int device) { return static_cast<c10::DeviceIndex>(device); }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace recording
