// The device's symmetric memory, like torch's for GPUs. It records its calls. A test can hold its
// rendezvous and its free, to simulate a missing peer or a busy device.
#include "symmetric.hpp"

#include <c10/core/Allocator.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <mutex>

#include "current.hpp"

namespace recording {
namespace {

namespace symmetric = c10d::symmetric_memory;

constexpr const char* kSwitches[] = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES",
                                     "TORCH_SYMM_MEM_DISABLE_MULTICAST"};

std::mutex mutex;
std::condition_variable changed;
bool held = false;
int inside = 0;
int most = 0;
std::vector<std::string> seen;

class Allocator final : public symmetric::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t size, int, const std::optional<std::string>&) override {
    return c10::GetAllocator(kType)->raw_allocate(size);
  }
  void free(void* address) override {
    {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [] { return !held; });
    }
    c10::GetAllocator(kType)->raw_deallocate(address);
  }
  size_t get_alloc_size(void*) override { return 0; }
  c10::intrusive_ptr<symmetric::SymmetricMemory> rendezvous(
      void*, const std::optional<std::string>&) override {
    std::unique_lock<std::mutex> lock(mutex);
    seen.clear();
    for (const char* name : kSwitches) {
      const char* value = std::getenv(name);
      seen.emplace_back(value == nullptr ? "" : value);
    }
    most = std::max(most, ++inside);
    changed.wait(lock, [] { return !held; });
    --inside;
    return {};  // never used
  }
  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return kType; }
  std::string name() override { return "recording"; }
};

}  // namespace

void addSymmetricMemory() {
  symmetric::register_allocator(kType, c10::make_intrusive<Allocator>());
}

void holdRendezvous(bool hold) {
  const std::lock_guard<std::mutex> lock(mutex);
  held = hold;
  if (hold) most = inside;
  changed.notify_all();
}

std::vector<std::string> switchesSeen() {
  const std::lock_guard<std::mutex> lock(mutex);
  return seen;
}

int mostAtOnce() {
  const std::lock_guard<std::mutex> lock(mutex);
  return most;
}

}  // namespace recording
