// NCCL's calls that move data, made by the addresses of its functions: CuPy loads the library, and
// makes, splits and owns the communicators, so there is no header and no link of NCCL's here.
// Nothing takes Python's lock. Numbers are those of NCCL's public header.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../base/clock.hpp"
#include "device_request.hpp"

namespace fastcoll {

/// The functions of the library that CuPy has loaded, of the types of nccl.h.
struct NcclFunctions {
  /// `addresses`: by name. `version`: as ncclGetVersion has it, such as 22907.
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

  /// A status in words: NCCL's for it, NCCL's for the last error, and what to do.
  std::string describe(int status) const;
};

/// The calls of one communicator. By one thread at a time, but for end().
class NcclCalls {
 public:
  /// `ranks`: of the communicator. `patience`: how long a call is waited for in which NCCL does not
  /// block; few communicators are such.
  NcclCalls(std::shared_ptr<const NcclFunctions> functions, std::uintptr_t communicator, int ranks,
            Milliseconds patience);

  std::uintptr_t communicator() const { return communicator_; }
  const NcclFunctions& functions() const { return *functions_; }

  /// Puts the requests on a stream, together where they are several. Throws Error: of kind Type if
  /// NCCL has no such reduction, and nothing was put on the stream; of kind Backend if NCCL failed.
  void issue(const std::vector<DeviceRequest>& requests, std::uintptr_t stream);

  /// What this thread calls between them, on any communicator, goes together; groups may be nested.
  void beginGroup();
  void endGroup();

  /// Called before the communicator is ended: who waits for a call then gives up.
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
