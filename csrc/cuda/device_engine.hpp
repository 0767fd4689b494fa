// The engine of device tensors. It puts each call on a stream, after the work that the caller's
// stream has so far, and tracks it with the watchdog.
//
// A synchronous call runs on the caller's own stream, so no other stream waits. An asynchronous
// call runs on the group's communication stream (high priority, one a device). That stream first
// waits for the caller's, and Work::wait() makes the caller's stream wait for the call. A group of
// one rank uses the caller's stream for both. No call waits on the host.
//
// Only torch's device-generic classes are used, so one build serves every torch. The tests run this
// code without a GPU, on a device that checks the order of all accesses.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/store.hpp"
#include "cuda/communicators.hpp"
#include "cuda/device_request.hpp"
#include "cuda/event_pool.hpp"
#include "cuda/in_flight.hpp"
#include "cuda/watchdog.hpp"

namespace fastcoll {

/// A call, ready to be put on a stream.
struct DeviceCall {
  explicit DeviceCall(c10::Stream current) : callers(current) {}

  const char* name = "";  // "all_reduce"
  bool async = true;
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

struct DeviceEngineConfig {
  WatchdogConfig watchdog;
  bool highPriority = true;
};

class DeviceEngine {
 public:
  /// `store`: carries fault reports between the ranks; used by this group only. `bell`: of all
  /// groups, in the store under all prefixes.
  DeviceEngine(DeviceEngineConfig config, std::unique_ptr<DeviceLibrary> library,
               std::unique_ptr<KeyValueStore> store, std::shared_ptr<FaultBell> bell,
               Watchdog::OnFault onFault);
  ~DeviceEngine();

  /// Makes the communicator of a device before its first call.
  void connect(c10::Device device);
  /// Splits that communicator; all ranks call it. `child`: the engine of this rank's new group, or
  /// nullptr if the rank joins none.
  void split(c10::Device device, int color, int key, DeviceEngine* child);

  /// The result of a launch. `callers`: when this stream waits for the end, the kept tensors are
  /// freed; nullopt if the calls came from several streams.
  struct Launched {
    InFlightRef flight;
    c10::Stream stream;
    std::optional<c10::Stream> callers;
  };
  /// Puts calls of one device on a stream, several as one operation. The first call's options apply
  /// to all.
  Launched launch(std::vector<DeviceCall> calls);

  /// Times all later calls.
  void enableTiming() { timed_.store(true, std::memory_order_relaxed); }
  void abort(ErrorKind kind, const std::string& cause) noexcept;
  /// Waits for calls under way, at most `grace`, and aborts the rest. Idempotent. Throws, at its
  /// end, what interrupted the wait, or else a fault that was not reported yet.
  void shutdown(Milliseconds grace);
  void setTimeout(Milliseconds timeout) { library_->setTimeout(timeout); }
  /// shutdown() for the end of the process: with little grace, and it logs errors instead of
  /// throwing.
  void end() noexcept;
  bool faulted(ErrorKind* kind = nullptr) const { return watchdog_->faulted(kind); }
  /// Throws Error if there was a fault, the group was closed, or this process is a fork.
  void throwIfUnusable(const char* call) const;
  std::uint64_t sequence() const { return watchdog_->sequence(); }

 private:
  struct OfDevice {
    c10::Stream communication;
    std::map<int, c10::Stream> pairs;
    std::shared_ptr<EventPool> events;
    std::shared_ptr<EventPool> timedEvents;
  };
  Launched launch(std::vector<DeviceCall> calls, const InFlightRef& flight);
  bool forked() const;
  OfDevice& ofDevice(const c10::impl::VirtualGuardImpl& impl, c10::Device device);
  c10::Stream streamFor(const c10::impl::VirtualGuardImpl& impl, OfDevice& own,
                        const DeviceCall& call);
  void prepare(c10::Device device, int pair, bool captured, const char* call);
  void compile(const std::vector<DeviceRequest>& requests, const c10::Stream& stream);
  void put(const std::vector<DeviceCall>& calls, const std::vector<DeviceRequest>& requests,
           OfDevice& own, const c10::Stream& stream, bool captured, InFlightCall& flight);

  const DeviceEngineConfig config_;
  const std::uint64_t forkGeneration_;
  const std::unique_ptr<DeviceLibrary> library_;
  const std::shared_ptr<Watchdog> watchdog_;
  std::atomic<bool> timed_{false};
  std::atomic<bool> shutDown_{false};

  std::mutex preparedMutex_;
  std::set<std::pair<c10::DeviceIndex, int>> prepared_;  // existing communicators

  // Held while calls are put on streams: their order and numbers must be equal on all ranks.
  std::mutex launchMutex_;
  std::map<c10::DeviceIndex, OfDevice> devices_;
};

}  // namespace fastcoll
