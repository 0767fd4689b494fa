// What the engine of device tensors asks of the library that moves them: addresses and counts, no
// tensors. The library is reached in Python (fastcoll/cuda/engine.py), which picks the algorithm.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../base/collective.hpp"
#include "../base/dtype.hpp"

namespace fastcoll {

/// A run of elements in a device's memory.
struct DeviceSpan {
  std::uintptr_t address = 0;
  std::int64_t count = 0;
};

/// One operation of the library. Counts are of elements; of all ranks' together for the output of
/// an all_gather and the input of a reduce_scatter. An address is 0 where this rank has no such
/// part.
struct DeviceRequest {
  Collective collective = Collective::Barrier;
  DType dtype = DType::UInt8;
  ReduceOp op = ReduceOp::None;
  int root = -1;        // or the peer of a send or receive
  double factor = 1.0;  // PREMUL_SUM
  DeviceSpan in;
  DeviceSpan out;
};

/// The way to the library. issue() is called by one thread at a time; the others by any.
class DeviceIssuer {
 public:
  virtual ~DeviceIssuer() = default;
  /// Puts the requests on the stream, together where they are several. True when the stream is
  /// being captured into a graph, so that nothing of it may be asked from another thread. Throws
  /// Error; then nothing of them may be relied on. `pair`: the one other rank that takes part, for
  /// which there is a communicator of two; or -1.
  virtual bool issue(const std::vector<DeviceRequest>& requests, const c10::Stream& stream,
                     int pair) = 0;
  /// What went wrong in the library since, or "". Must not wait for Python.
  virtual std::string poll() noexcept = 0;
  /// Ends everything under way, on this rank. Must not wait for Python.
  virtual void abort() noexcept = 0;
  /// Equal on all ranks of this life of the group, and of no other; "" before the first issue().
  virtual std::string instance() noexcept = 0;
  /// Gives the library's state back, after the last operation.
  virtual void close() noexcept = 0;
};

}  // namespace fastcoll
