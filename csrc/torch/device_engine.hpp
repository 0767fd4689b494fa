// What the process group asks of the module that moves device tensors. fastcoll._cuda implements it
// (cuda/cuda_engine.hpp), and is loaded at a group's first device tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/exported.hpp"
#include "cpu/algorithms/algorithm.hpp"
#include "torch/options.hpp"
#include "trace/trace.hpp"

namespace fastcoll {

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

  bool operator==(const AllReduceOptions&) const = default;
};

/// One operation of the library that moves the data: addresses and counts, no tensors. Counts are
/// in elements. The output of an all_gather and the input of a reduce_scatter count the elements of
/// all ranks. An address is 0 if this rank has no such buffer.
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

/// A call, ready to be put on a stream.
struct DeviceCall {
  explicit DeviceCall(c10::Stream current) : callers(current) {}

  const char* name = "";  // "all_reduce"
  bool async = true;
  bool timed = false;  // measure how long it takes on the device
  Milliseconds timeout{};
  /// Held until the call ends: extensions of the group's timeouts end with it.
  std::shared_ptr<void> extension;
  DType dtype = DType::UInt8;
  /// The stream that was current when the call was made. It orders the memory of the call's
  /// tensors.
  c10::Stream callers;
  /// The peer of a send or receive outside a batch, in a group that is not bound to a device; else
  /// -1. Each pair of ranks has its own stream and communicator, so these calls wait for no others.
  int pair = -1;
  /// All ranks make this call, even a rank that has nothing to move.
  bool everyone = true;
  std::vector<DeviceRequest> requests;
  trace::RecordId trace = 0;
  /// All tensors whose memory the call touches on its stream.
  std::vector<at::Tensor> used;
  /// Called after the requests, with the stream current. Copies results to tensors that are not
  /// dense.
  std::function<void()> after;
};

/// How torch sees a launch: its type, the profiler's title and inputs, the value of its future.
struct WorkDraft {
  c10d::OpType type = c10d::OpType::UNKNOWN;
  const char* title = nullptr;
  std::optional<std::vector<at::Tensor>> profiled;
  std::vector<at::Tensor> outputs;
};

class DeviceEngine {
 public:
  virtual ~DeviceEngine() = default;
  /// Makes the communicator of a device before its first call.
  virtual void connect(c10::Device device) = 0;
  /// Splits that communicator; all ranks call it. `child`: the engine of this rank's new group, or
  /// nullptr if the rank joins none.
  virtual void split(c10::Device device, int color, int key, DeviceEngine* child) = 0;
  /// Appends the operations that `request` takes on this rank.
  virtual void plan(const Request& request, std::vector<DeviceRequest>& into) const = 0;
  /// Puts calls of one device on a stream, several as one operation. The first call's options apply
  /// to all. Without `draft` there is no work.
  virtual c10::intrusive_ptr<c10d::Work> launch(std::vector<DeviceCall> calls,
                                                std::optional<WorkDraft> draft) = 0;
  /// Returns a function that waits on the host for all that the device's current stream has so far.
  virtual std::function<void()> reached(c10::Device device, Milliseconds timeout,
                                        ErrorSite site) = 0;
  virtual void setTimeout(Milliseconds timeout) = 0;
  virtual void abort(ErrorKind kind, const std::string& cause) noexcept = 0;
  /// Waits for calls under way, at most `grace`, and aborts the rest. Idempotent. Throws, at its
  /// end, what interrupted the wait, or else a fault that was not reported yet.
  virtual void shutdown(Milliseconds grace) = 0;
  /// shutdown() for the end of the process: with little grace, and it logs errors instead of
  /// throwing.
  virtual void end() noexcept = 0;
  virtual bool faulted(ErrorKind* kind = nullptr) const = 0;
  /// Throws Error if there was a fault, the group was closed, or this process is a fork.
  virtual void throwIfUnusable(const char* call) const = 0;
  /// The number of the last call.
  virtual std::uint64_t sequence() const = 0;
};

/// The group that an engine is made for.
struct DeviceGroup {
  c10::intrusive_ptr<c10d::Store> store;  // for this engine alone
  std::string name;
  Settings settings;
  int rank = 0;
  int size = 1;
  c10::intrusive_ptr<Options> options;
  c10::DeviceType device = c10::DeviceType::CUDA;
  /// Called before a fault ends any call.
  std::function<void()> failing;
  /// Called with the group's first fault, on any thread. Must not wait for Python.
  std::function<void(ErrorKind, const std::string&)> onFault;
};

using DeviceEngineMaker = std::function<std::shared_ptr<DeviceEngine>(DeviceGroup)>;
/// fastcoll._cuda calls it when it is loaded. The first call counts.
FASTCOLL_EXPORTED void setDeviceEngineMaker(DeviceEngineMaker maker);
/// Sets what loads fastcoll._cuda.
void setDeviceLoader(std::function<void()> load);

}  // namespace fastcoll
