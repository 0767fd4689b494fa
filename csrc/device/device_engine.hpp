// The engine of tensors on a device with streams: puts each call on a stream, behind what the
// caller's stream has done so far, and knows of every call whether it has ended.
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

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../base/error.hpp"
#include "../base/store.hpp"
#include "device_request.hpp"
#include "event_pool.hpp"
#include "flight.hpp"

namespace fastcoll {

/// A call, ready to be put on a stream.
struct DeviceCall {
  const char* name = "";  // "all_reduce"
  bool async = true;
  Milliseconds timeout{};
  c10::Device device{c10::kCPU};
  DType dtype = DType::UInt8;
  /// The peer of a send or receive that is in no batch, else -1. Each pair of ranks has a stream
  /// and a communicator of its own for these, so that they wait for nothing else.
  int pair = -1;
  std::vector<DeviceRequest> requests;
  /// Everything whose memory the call touches on its stream.
  std::vector<at::Tensor> used;
  /// Called with the stream current, behind the requests: copies results to tensors that are not
  /// dense.
  std::function<void()> after;
};

struct DeviceEngineConfig {
  std::string name;
  int rank = 0;
  int size = 1;
  bool highPriority = true;
  /// How often the watchdog looks at what is under way.
  Milliseconds tick{100};
};

class DeviceEngine : public std::enable_shared_from_this<DeviceEngine> {
 public:
  /// `store`: through which the ranks tell each other of faults; one of the group's own.
  DeviceEngine(DeviceEngineConfig config, std::unique_ptr<DeviceIssuer> issuer,
               std::unique_ptr<KeyValueStore> store);
  ~DeviceEngine();

  /// What came of a launch.
  struct Launched {
    FlightRef flight;
    c10::Stream stream;
  };
  /// Puts calls on a stream of their device, as one operation where they are several; their
  /// options are the first one's.
  Launched launch(std::vector<DeviceCall> calls);

  void abort(ErrorKind kind, const std::string& cause) noexcept;
  /// Waits for what is under way, `grace` at most, and aborts the rest. Idempotent, never throws.
  void shutdown(Milliseconds grace) noexcept;
  /// At the end of the process: all that live, with little grace.
  static void shutdownAll() noexcept;
  bool faulted(ErrorKind* kind = nullptr) const;
  std::uint64_t sequence() const;
  const DeviceEngineConfig& config() const { return config_; }
  std::string prefix(const char* call, std::uint64_t seq) const;

 private:
  struct OfDevice {
    c10::Stream communication;
    std::map<int, c10::Stream> pairs;
    std::shared_ptr<EventPool> events;
  };
  OfDevice& ofDevice(const c10::impl::VirtualGuardImpl& impl, c10::Device device);
  c10::Stream streamFor(const c10::impl::VirtualGuardImpl& impl, OfDevice& own,
                        const DeviceCall& call);
  void throwIfUnusable(const char* call) const;
  std::vector<FlightRef> enroll(const FlightRef& flight);
  void strike(const FlightRef& flight);

  // device_watchdog.cpp
  void watch() noexcept;
  void startWatching();
  void lookAtFlights();
  void tellPeers(const std::string& cause) noexcept;
  std::string heardFromPeers() noexcept;
  std::string whereAllAre() noexcept;

  const DeviceEngineConfig config_;
  const std::uint64_t forkGeneration_;
  std::unique_ptr<DeviceIssuer> issuer_;
  std::unique_ptr<KeyValueStore> store_;

  // Held while calls are put on streams, so that all ranks' calls have the same order and numbers.
  std::mutex launchMutex_;
  std::map<c10::DeviceIndex, OfDevice> devices_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<FlightRef> flights_;  // in order
  std::vector<FlightRef> toFree_;  // ended, and still keeping tensors: not for the watchdog to free
  std::uint64_t sequence_ = 0;     // of the last call put on a stream
  std::uint64_t completed_ = 0;    // of the last whose end was seen
  bool closed_ = false;
  bool failed_ = false;
  ErrorKind faultKind_ = ErrorKind::Backend;
  std::string fault_;
  std::thread watchdog_;
};

}  // namespace fastcoll
