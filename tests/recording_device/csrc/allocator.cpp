// Device memory is host memory with real addresses, so libraries of host code can work on it.
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <cstring>

#include "current.hpp"
#include "recorder.hpp"

namespace recording {
namespace {

constexpr size_t kAlignment = 512;  // as in torch's CUDA allocator
constexpr int kPoison = 0xEE;       // as float -3.7e28, which stands out in any sum

void freeBlock(void* address) {
  if (address == nullptr) return;
  std::memset(address, kPoison, Recorder::get().free(address));
  std::free(address);
}

// A DeviceAllocator, because torch.accelerator's memory functions cast to one.
struct BlockAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(currentDevice()));
    if (bytes == 0) return {nullptr, nullptr, &freeBlock, device};
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* address = std::aligned_alloc(kAlignment, rounded);
    TORCH_CHECK_WITH(OutOfMemoryError, address != nullptr, "no memory for ", bytes, " bytes");
    std::memset(address, kPoison, bytes);
    Recorder::get().allocate(address, bytes, currentStream());
    return {address, address, &freeBlock, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &freeBlock; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Recorder::get().recordStream(data.get(), indexOf(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

// Never destroyed: tensors may be freed when the process ends.
const c10::AllocatorRegisterer<kType> registerer(new BlockAllocator);

}  // namespace
}  // namespace recording
