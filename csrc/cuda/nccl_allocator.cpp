// Device memory from NCCL's allocator, which NCCL registers best, for torch's memory pools. torch's
// CUDAPluggableAllocator looks these functions up by name (fastcoll/cuda/memory_pools.py).
#include <atomic>
#include <cstddef>

#include "cuda/nccl.hpp"

namespace fastcoll {
namespace {

using Allocate = int (*)(void** address, std::size_t bytes);
using Free = int (*)(void* address);

std::atomic<Allocate> allocate{nullptr};
std::atomic<Free> release{nullptr};

}  // namespace

void setNcclAllocator(std::uintptr_t ncclMemAlloc, std::uintptr_t ncclMemFree) {
  allocate.store(reinterpret_cast<Allocate>(ncclMemAlloc));
  release.store(reinterpret_cast<Free>(ncclMemFree));
}

}  // namespace fastcoll

extern "C" {

/// Allocates on the current device. Returns NULL if NCCL refuses, which torch takes as out of
/// memory.
__attribute__((visibility("default"))) void* fastcoll_nccl_allocate(std::size_t bytes,
                                                                    int /*device*/,
                                                                    void* /*stream*/) {
  void* address = nullptr;
  const auto function = fastcoll::allocate.load();
  return function != nullptr && function(&address, bytes) == 0 ? address : nullptr;
}

__attribute__((visibility("default"))) void fastcoll_nccl_free(void* address, std::size_t /*bytes*/,
                                                               int /*device*/, void* /*stream*/) {
  if (const auto function = fastcoll::release.load()) function(address);
}

}  // extern "C"
