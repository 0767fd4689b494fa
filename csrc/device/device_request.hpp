// What the engine of device tensors asks of the library that moves them: addresses and counts, no
// tensors.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../base/clock.hpp"
#include "../base/collective.hpp"
#include "../base/dtype.hpp"

namespace fastcoll {

class Communicators;

/// A run of elements in a device's memory.
struct DeviceSpan {
  std::uintptr_t address = 0;
  std::int64_t count = 0;
};

/// What an all-reduce is to do beside what torch's own arguments say; equal on all ranks.
struct AllReduceOptions {
  /// What messages of a wider floating-point type travel as.
  std::optional<DType> wire;
  double scale = 1.0;        // factor of the result, applied before it is rounded
  std::string algorithm;     // its name; empty: FASTCOLL_ALGO's
  std::optional<bool> fuse;  // a list as one bucket; nullopt: if its tensors are many and small

  bool operator==(const AllReduceOptions& other) const {
    return wire == other.wire && scale == other.scale && algorithm == other.algorithm &&
           fuse == other.fuse;
  }
};

/// One operation of the library. Counts are of elements; of all ranks' together for the output of
/// an all_gather and the input of a reduce_scatter. An address is 0 where this rank has no such
/// part.
struct DeviceRequest {
  Collective collective = Collective::Barrier;
  DType dtype = DType::UInt8;
  ReduceOp op = ReduceOp::None;
  int root = -1;                      // or the peer of a send or receive
  double factor = 1.0;                // PREMUL_SUM
  std::uintptr_t factorOnDevice = 0;  // where the factor is, of `dtype`, if not 0
  DeviceSpan in;
  DeviceSpan out;
  std::shared_ptr<const AllReduceOptions> options;  // nullptr: there are none
};

/// The way to the library. No call of it may hold a lock of the engine's that the watchdog takes.
class DeviceIssuer {
 public:
  virtual ~DeviceIssuer() = default;
  /// Makes the communicator of a device, or of a pair of ranks on it (`pair` is the other one; -1:
  /// all ranks), if there is none; waits for the other ranks. From any thread. `captured`: the
  /// caller's stream is being captured into a graph, where none can be made.
  virtual void prepare(c10::Device device, int pair, bool captured) = 0;
  /// Divides the ranks of a device's communicator; all of them call it. Those with one `color` get
  /// one for their group, whose issuer is `child`, in the order of `key`; nullptr: none (color -1).
  virtual void split(c10::Device device, int color, int key, DeviceIssuer* child) = 0;
  /// Makes the code for requests that come for the first time, which may take seconds. From any
  /// thread, with the stream that issue() gets later or the caller's; puts nothing on it.
  virtual void compile(const std::vector<DeviceRequest>& requests, const c10::Stream& stream) = 0;
  /// Puts the requests on the stream, together where they are several, on the communicator that
  /// prepare() made. By one thread at a time. Throws Error; those of kinds Value and Type say that
  /// nothing was put on the stream, on any rank that makes this call.
  virtual void issue(const std::vector<DeviceRequest>& requests, const c10::Stream& stream,
                     int pair) = 0;
  /// How long ranks wait for each other from the next call on, where they have no limit of their
  /// own: communicators, and kernels that wait on the device. From any thread.
  virtual void setTimeout(Milliseconds timeout) = 0;
  /// What of it can be asked and ended without Python.
  virtual std::shared_ptr<Communicators> communicators() = 0;
  /// Gives the library's state back, after the last operation.
  virtual void close() noexcept = 0;
};

}  // namespace fastcoll
