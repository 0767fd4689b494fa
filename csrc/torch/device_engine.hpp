// What the process group asks of the module that moves device tensors. fastcoll._cuda implements it
// (cuda/cuda_engine.hpp), and is loaded at a group's first device tensor.
#pragma once

#include <c10/core/Device.h>
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
#include "torch/host_peers.hpp"
#include "torch/options.hpp"

namespace fastcoll {

/// A run of elements in a device's memory.
struct DeviceSpan {
  std::uintptr_t address = 0;
  std::int64_t count = 0;

  bool operator==(const DeviceSpan&) const = default;
};

/// Options of an all-reduce beyond torch's own arguments; equal on all ranks.
struct AllReduceOptions {
  /// The wire dtype of messages of a wider floating-point type.
  std::optional<DType> wire;
  double scale = 1.0;        // factor of the result, applied before it is rounded
  std::string algorithm;     // by name; empty: the one of FASTCOLL_ALGO
  std::optional<bool> fuse;  // a list as one bucket; nullopt: only if it has many small tensors
  /// Where kernels write float64 sums of the results' squares; 0: nowhere.
  std::uintptr_t squares = 0;

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

  bool operator==(const DeviceRequest&) const = default;
};

class Call;
using CallRef = std::shared_ptr<Call>;

/// Calls of one device that are launched as one. A plan keeps it: its later runs find all that the
/// first one has computed.
struct DeviceLaunch {
  std::vector<CallRef> calls;
  std::vector<DeviceRequest> requests = {};  // of the calls
  std::shared_ptr<void> found = {};          // by the library, for the requests
};

class DeviceEngine {
 public:
  virtual ~DeviceEngine() = default;
  /// Binds the group to a device: makes its communicator before the first call, which then also
  /// serves pairs of ranks.
  virtual void connect(c10::Device device) = 0;
  /// The device that the group is bound to; nullopt: none.
  virtual std::optional<c10::Device> bound() const = 0;
  /// Splits the bound device's communicator; all ranks call it. `child`: the engine of this rank's
  /// new group, or nullptr if the rank joins none.
  virtual void split(int color, int key, DeviceEngine* child) = 0;
  /// Puts calls on a stream, several as one operation. The first call's terms apply to all. From
  /// one thread at a time for each launch. Returns nullptr unless `work`.
  virtual c10::intrusive_ptr<c10d::Work> launch(DeviceLaunch& launch, bool work) = 0;
  /// Returns what a barrier does before the ranks meet on their hosts: it waits on the host for all
  /// that the current stream has so far, on the device that the barrier names, or else was used
  /// last. The ranks meet whatever devices each has used, so the devices themselves do not meet.
  /// nullptr: the group has used no device and is bound to none, so it waits for none, even if the
  /// caller names one: torch names device 0 if there is no device.
  virtual std::function<void()> behind(const Call& barrier, Milliseconds timeout) = 0;
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
  std::shared_ptr<HostPeers> peers;
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
