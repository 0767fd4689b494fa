// NCCL's calls that move data, made by the addresses of its functions. CuPy loads the library, and
// fastcoll.cuda makes the communicators, so NCCL is neither included nor linked here. No call takes
// the GIL. Numbers are those of NCCL's public header.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "torch/device_engine.hpp"

namespace fastcoll {

/// NCCL's functions that are called from here, with their types in nccl.h: result, name here, name
/// there, arguments.
#define FASTCOLL_NCCL_FUNCTIONS(X)                                                             \
  X(int, allReduce, "ncclAllReduce",                                                           \
    (const void*, void*, std::size_t, int type, int op, void* comm, void* stream))             \
  X(int, reduce, "ncclReduce",                                                                 \
    (const void*, void*, std::size_t, int type, int op, int root, void* comm, void* stream))   \
  X(int, reduceScatter, "ncclReduceScatter",                                                   \
    (const void*, void*, std::size_t, int type, int op, void* comm, void* stream))             \
  X(int, allGather, "ncclAllGather",                                                           \
    (const void*, void*, std::size_t, int type, void* comm, void* stream))                     \
  X(int, broadcast, "ncclBroadcast",                                                           \
    (const void*, void*, std::size_t, int type, int root, void* comm, void* stream))           \
  X(int, send, "ncclSend",                                                                     \
    (const void*, std::size_t, int type, int peer, void* comm, void* stream))                  \
  X(int, recv, "ncclRecv", (void*, std::size_t, int type, int peer, void* comm, void* stream)) \
  X(int, createPreMulSum, "ncclRedOpCreatePreMulSum",                                          \
    (int* op, void* factor, int type, int residence, void* comm))                              \
  X(int, destroyOp, "ncclRedOpDestroy", (int op, void* comm))                                  \
  X(int, groupStart, "ncclGroupStart", ())                                                     \
  X(int, groupEnd, "ncclGroupEnd", ())                                                         \
  X(int, commAbort, "ncclCommAbort", (void* comm))                                             \
  X(int, commGetAsyncError, "ncclCommGetAsyncError", (void* comm, int* status))                \
  X(const char*, getErrorString, "ncclGetErrorString", (int status))                           \
  X(const char*, getLastError, "ncclGetLastError", (void* comm))

/// ncclResult_t.
constexpr int kNcclSuccess = 0;
constexpr int kNcclInProgress = 7;

/// Functions of the library that CuPy has loaded.
struct NcclFunctions {
  /// `addressOf`: returns a function's address by its name, or 0. `version`: as ncclGetVersion
  /// returns it, such as 22907. Throws Error(Backend) if a function is missing.
  NcclFunctions(const std::function<std::uintptr_t(const char*)>& addressOf, int version);

  int version;
#define FASTCOLL_POINTER(Result, name, text, arguments) Result(*name) arguments;
  FASTCOLL_NCCL_FUNCTIONS(FASTCOLL_POINTER)
#undef FASTCOLL_POINTER
  int (*commMemStats)(void* comm, int stat, std::uint64_t* value) = nullptr;  // from 2.29.7 on

  /// The text of a status: NCCL's name for it, NCCL's last error, and a remedy.
  std::string describe(int status) const;
  /// Asks for a communicator's status, in turn: of a nonblocking one NCCL joins its thread there,
  /// and both the watchdog and the caller ask.
  int statusOf(std::uintptr_t communicator) const;
  /// Device memory of a communicator, in bytes; -1 if the library does not count it.
  std::int64_t bytesOf(std::uintptr_t communicator) const;

 private:
  mutable std::mutex asking_;
};

/// The calls of one communicator. One thread at a time, except end().
class NcclCalls {
 public:
  /// `ranks`: of the communicator. `patience`: how long to wait for a call on a nonblocking
  /// communicator; few are nonblocking.
  NcclCalls(std::shared_ptr<const NcclFunctions> functions, std::uintptr_t communicator, int ranks,
            Milliseconds patience);

  std::uintptr_t communicator() const { return communicator_; }
  const NcclFunctions& functions() const { return *functions_; }

  /// Throws Error(Type) if NCCL has no such reduction, or Error(Value) if it has no such call.
  static void throwIfRefused(const std::vector<DeviceRequest>& requests);
  /// Puts the requests, which are not refused, on a stream, several as one group. Throws
  /// Error(Backend) if NCCL failed.
  void issue(const std::vector<DeviceRequest>& requests, std::uintptr_t stream);

  /// Call before the communicator is ended: a thread that waits for a call then throws.
  void end() noexcept { ended_.store(true, std::memory_order_release); }

 private:
  class Operations;

  /// Whether the result is there already: NCCL would launch a kernel even for an average of one
  /// rank.
  bool changesNothing(const DeviceRequest& request) const;
  int call(const DeviceRequest& request, int op, void* stream) const;
  void finish(int status) const;
  void throwIfEnded() const;

  const std::shared_ptr<const NcclFunctions> functions_;
  const std::uintptr_t communicator_;
  const int ranks_;
  const Milliseconds patience_;
  std::atomic<bool> ended_{false};
};

/// Sets the addresses of NCCL's functions for fastcoll_nccl_allocate and fastcoll_nccl_free
/// (nccl_allocator.cpp).
void setNcclAllocator(std::uintptr_t ncclMemAlloc, std::uintptr_t ncclMemFree);

}  // namespace fastcoll
