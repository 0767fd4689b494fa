#pragma once

#include <cstdint>

namespace fastcoll {

/// Sets the addresses of NCCL's functions for fastcoll_nccl_allocate and fastcoll_nccl_free.
void setNcclAllocator(std::uintptr_t ncclMemAlloc, std::uintptr_t ncclMemFree);

}  // namespace fastcoll
