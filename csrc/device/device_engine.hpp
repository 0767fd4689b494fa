// The engine of tensors on a device with streams: puts each call on a stream, behind what the
// caller's stream has done so far, and shows it to the watchdog.
//
// A synchronous call goes onto the caller's own stream: no other stream has to wait. An
// asynchronous one goes onto the group's communication stream (high priority, one a device), which
// first waits for the caller's; the caller's waits for it in Work::wait(). No call waits on the
// host.
//
// Only torch's device-generic classes are used, so that one build serves every torch, and the tests
// run these lines on a device without a GPU that checks the order of all accesses.
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

#include "../base/error.hpp"
#include "../base/store.hpp"
#include "communicators.hpp"
#include "device_request.hpp"
#include "event_pool.hpp"
#include "flight.hpp"
#include "watchdog.hpp"

namespace fastcoll {

/// A call, ready to be put on a stream.
struct DeviceCall {
  explicit DeviceCall(c10::Stream current) : callers(current) {}

  const char* name = "";  // "all_reduce"
  bool async = true;
  Milliseconds timeout{};
  /// Held until it ends: extensions of the group's timeouts end with it.
  std::shared_ptr<void> extension;
  DType dtype = DType::UInt8;
  /// The stream that was current when it was made: its tensors' memory is ordered by it.
  c10::Stream callers;
  /// The peer of a send or receive that is in no batch, and whose group is not bound to a device,
  /// else -1. Each pair of ranks has a stream and a communicator of its own for these, so that they
  /// wait for nothing else.
  int pair = -1;
  /// All ranks make this call, also those that have nothing to move in it.
  bool everyone = true;
  std::vector<DeviceRequest> requests;
  trace::RecordId trace = 0;
  /// Everything whose memory the call touches on its stream.
  std::vector<at::Tensor> used;
  /// Called with the stream current, behind the requests: copies results to tensors that are not
  /// dense.
  std::function<void()> after;
};

struct DeviceEngineConfig {
  WatchdogConfig watchdog;
  bool highPriority = true;
};

class DeviceEngine {
 public:
  /// `store`: through which the ranks tell each other of faults; one of the group's own.
  DeviceEngine(DeviceEngineConfig config, std::unique_ptr<DeviceIssuer> issuer,
               std::unique_ptr<KeyValueStore> store, Watchdog::OnFault onFault);
  ~DeviceEngine();

  /// Makes the communicator of a device before its first call.
  void connect(c10::Device device);
  /// Divides that communicator; all ranks call it. `child` is the engine of this rank's part of the
  /// ranks; nullptr: it is in none.
  void split(c10::Device device, int color, int key, DeviceEngine* child);

  /// What came of a launch. `callers`: whose wait for the end frees what the call keeps; nullopt if
  /// that takes more than one stream's.
  struct Launched {
    FlightRef flight;
    c10::Stream stream;
    std::optional<c10::Stream> callers;
  };
  /// Puts calls of one device on a stream, as one operation where they are several; their options
  /// are the first one's.
  Launched launch(std::vector<DeviceCall> calls);

  /// From now on calls are timed.
  void enableTiming() { timed_.store(true, std::memory_order_relaxed); }
  void abort(ErrorKind kind, const std::string& cause) noexcept;
  /// Waits for what is under way, `grace` at most, and aborts the rest. Idempotent. Throws, at its
  /// end, a fault that nobody was told of, and what interrupted the waiting.
  void shutdown(Milliseconds grace);
  void setTimeout(Milliseconds timeout) { issuer_->setTimeout(timeout); }
  /// The same where there is nobody to tell: at the end of the process, with little grace.
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
  Launched launch(std::vector<DeviceCall> calls, const FlightRef& flight);
  bool forked() const;
  OfDevice& ofDevice(const c10::impl::VirtualGuardImpl& impl, c10::Device device);
  c10::Stream streamFor(const c10::impl::VirtualGuardImpl& impl, OfDevice& own,
                        const DeviceCall& call);
  void prepare(c10::Device device, int pair, bool captured, const char* call);
  void compile(const std::vector<DeviceRequest>& requests, const c10::Stream& stream);
  void put(const std::vector<DeviceCall>& calls, const std::vector<DeviceRequest>& requests,
           OfDevice& own, const c10::Stream& stream, bool captured, Flight& flight);

  const DeviceEngineConfig config_;
  const std::uint64_t forkGeneration_;
  const std::unique_ptr<DeviceIssuer> issuer_;
  const std::shared_ptr<Watchdog> watchdog_;
  std::atomic<bool> timed_{false};
  std::atomic<bool> shutDown_{false};

  std::mutex preparedMutex_;
  std::set<std::pair<c10::DeviceIndex, int>> prepared_;  // communicators that there are

  // Held while calls are put on streams, so that all ranks' calls have the same order and numbers.
  std::mutex launchMutex_;
  std::map<c10::DeviceIndex, OfDevice> devices_;
};

}  // namespace fastcoll
