// Requests of the device engine to the library that moves data: addresses and counts, no tensors.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/collective.hpp"
#include "base/dtype.hpp"

namespace fastcoll {

class Communicators;

/// A run of elements in a device's memory.
struct DeviceSpan {
  std::uintptr_t address = 0;
  std::int64_t count = 0;
};

/// Options of an all-reduce beyond torch's own arguments; equal on all ranks.
struct AllReduceOptions {
  /// The wire dtype of messages of a wider floating-point type.
  std::optional<DType> wire;
  double scale = 1.0;        // factor of the result, applied before it is rounded
  std::string algorithm;     // by name; empty: the one of FASTCOLL_ALGO
  std::optional<bool> fuse;  // a list as one bucket; nullopt: only if it has many small tensors

  bool operator==(const AllReduceOptions& other) const {
    return wire == other.wire && scale == other.scale && algorithm == other.algorithm &&
           fuse == other.fuse;
  }
};

/// One operation of the library. Counts are in elements. The output of an all_gather and the input
/// of a reduce_scatter count the elements of all ranks. An address is 0 if this rank has no such
/// buffer.
struct DeviceRequest {
  Collective collective = Collective::Barrier;
  DType dtype = DType::UInt8;
  ReduceOp op = ReduceOp::None;
  int root = -1;                      // or the peer of a send or receive
  double factor = 1.0;                // PREMUL_SUM
  std::uintptr_t factorOnDevice = 0;  // if not 0: its address, one element of partOf(dtype)
  DeviceSpan in;
  DeviceSpan out;
  std::shared_ptr<const AllReduceOptions> options;  // nullptr: none
};

/// Calls the library. Make no call of it under an engine lock that the watchdog takes.
class DeviceLibrary {
 public:
  virtual ~DeviceLibrary() = default;
  /// Makes the communicator of a device, or of a pair of ranks on it, if there is none. Waits for
  /// the other ranks. From any thread. `pair`: the other rank of a pair; -1: all ranks. `captured`:
  /// the caller's stream is being captured into a graph, so none can be made.
  virtual void prepare(c10::Device device, int pair, bool captured) = 0;
  /// Splits a device's communicator; all its ranks call it. Ranks with the same `color` get a
  /// communicator for their new group, in the order of `key`; `child` is that group's library.
  /// nullptr: none (color -1).
  virtual void split(c10::Device device, int color, int key, DeviceLibrary* child) = 0;
  /// Compiles kernels for requests that come for the first time, which may take seconds. From any
  /// thread. `stream`: the one that issue() gets later, or the caller's; nothing is put on it.
  virtual void compile(const std::vector<DeviceRequest>& requests, const c10::Stream& stream) = 0;
  /// Puts the requests on the stream, several as one group, on the communicator that prepare()
  /// made. One thread at a time. Throws Error. With kinds Value and Type, nothing was put on the
  /// stream, on any rank that makes this call. `captured`: the stream is being captured into a
  /// graph.
  virtual void issue(const std::vector<DeviceRequest>& requests, const c10::Stream& stream,
                     int pair, bool captured) = 0;
  /// Sets how long ranks wait for each other from the next call on, where they have no limit of
  /// their own: communicators, and kernels that wait on the device. From any thread.
  virtual void setTimeout(Milliseconds timeout) = 0;
  /// The communicators, which can be polled and aborted without Python.
  virtual std::shared_ptr<Communicators> communicators() = 0;
  /// Releases the library's state, after the last operation.
  virtual void close() noexcept = 0;
};

}  // namespace fastcoll
