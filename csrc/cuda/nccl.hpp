// NCCL's calls that move data, made by the addresses of its functions. CuPy loads the library, and
// fastcoll.cuda makes the communicators, so NCCL is neither included nor linked here. No call takes
// the GIL. Numbers are those of NCCL's public header.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "cuda/device_request.hpp"

namespace fastcoll {

/// Functions of the library that CuPy has loaded, with the types of nccl.h.
struct NcclFunctions {
  /// `addresses`: by name. `version`: as ncclGetVersion returns it, such as 22907.
  NcclFunctions(const std::map<std::string, std::uintptr_t>& addresses, int version);

  int version;
  int (*allReduce)(const void*, void*, std::size_t, int type, int op, void* comm, void* stream);
  int (*reduce)(const void*, void*, std::size_t, int type, int op, int root, void* comm, void*);
  int (*reduceScatter)(const void*, void*, std::size_t, int type, int op, void* comm, void*);
  int (*allGather)(const void*, void*, std::size_t, int type, void* comm, void* stream);
  int (*broadcast)(const void*, void*, std::size_t, int type, int root, void* comm, void* stream);
  int (*send)(const void*, std::size_t, int type, int peer, void* comm, void* stream);
  int (*recv)(void*, std::size_t, int type, int peer, void* comm, void* stream);
  int (*createPreMulSum)(int* op, void* factor, int type, int residence, void* comm);
  int (*destroyOp)(int op, void* comm);
  int (*groupStart)();
  int (*groupEnd)();
  int (*commAbort)(void* comm);
  int (*commGetAsyncError)(void* comm, int* status);
  const char* (*getErrorString)(int status);
  const char* (*getLastError)(void* comm);

  /// The text of a status: NCCL's name for it, NCCL's last error, and a remedy.
  std::string describe(int status) const;
  /// Asks for a communicator's status, in turn: of a nonblocking one NCCL joins its thread there,
  /// and both the watchdog and the caller ask.
  int statusOf(std::uintptr_t communicator) const;

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

  /// Puts the requests on a stream, several as one group. Throws Error(Type) if NCCL has no such
  /// reduction; nothing was put on the stream then. Throws Error(Backend) if NCCL failed.
  void issue(const std::vector<DeviceRequest>& requests, std::uintptr_t stream);

  /// All calls of this thread between the two, on any communicator, form one group. Groups may be
  /// nested.
  void beginGroup();
  void endGroup();

  /// Call before the communicator is ended: a thread that waits for a call then throws.
  void end() noexcept { ended_.store(true, std::memory_order_release); }

 private:
  struct Prepared;
  class Operations;

  Prepared prepare(const DeviceRequest& request, Operations& operations) const;
  int call(const Prepared& prepared, void* stream) const;
  void finish(int status) const;
  void throwIfEnded() const;

  const std::shared_ptr<const NcclFunctions> functions_;
  const std::uintptr_t communicator_;
  const int ranks_;
  const Milliseconds patience_;
  std::atomic<bool> ended_{false};
};

}  // namespace fastcoll
