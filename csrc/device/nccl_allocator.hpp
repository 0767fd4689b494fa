#pragma once

#include <cstdint>

namespace fastcoll {

/// What fastcoll_nccl_allocate and fastcoll_nccl_free call: addresses of NCCL's functions.
void setNcclAllocator(std::uintptr_t ncclMemAlloc, std::uintptr_t ncclMemFree);

}  // namespace fastcoll
