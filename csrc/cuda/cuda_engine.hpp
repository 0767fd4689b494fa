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

#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/device_library.hpp"
#include "cuda/device_work.hpp"
#include "cuda/flight_pool.hpp"
#include "cuda/in_flight.hpp"
#include "cuda/watchdog.hpp"
#include "torch/device_engine.hpp"

namespace fastcoll {

class CudaEngine : public DeviceEngine, public std::enable_shared_from_this<CudaEngine> {
 public:
  CudaEngine(const DeviceGroup& group, std::unique_ptr<DeviceLibrary> library);
  ~CudaEngine() override;

  void connect(c10::Device device) override;
  std::optional<c10::Device> bound() const override;
  void split(int color, int key, DeviceEngine* child) override;
  c10::intrusive_ptr<c10d::Work> launch(DeviceLaunch& launch, bool work) override;
  std::function<void()> behind(const Call& barrier, Milliseconds timeout) override;
  void abort(ErrorKind kind, const std::string& cause) noexcept override;
  void shutdown(Milliseconds grace) override;
  void setTimeout(Milliseconds timeout) override { library_->setTimeout(timeout); }
  void end() noexcept override;
  bool faulted(ErrorKind* kind = nullptr) const override { return watchdog_->faulted(kind); }
  void throwIfUnusable(const char* call) const override;
  std::uint64_t sequence() const override { return watchdog_->sequence(); }

 private:
  struct OfDevice {
    c10::Stream communication;
    std::map<int, c10::Stream> pairs;
    // Under the launch lock:
    c10::Event ready;  // recorded on a caller's stream, for the next stream that waits
    std::unordered_map<c10::Stream, FlightPool> flights;
  };
  InFlightRef put(DeviceLaunch& launch);
  std::vector<DeviceRequest> requestsOf(const std::vector<CallRef>& calls) const;
  bool forked() const;
  OfDevice& ofDevice(const c10::impl::VirtualGuardImpl& impl, c10::Device device);
  c10::Stream streamFor(const c10::impl::VirtualGuardImpl& impl, OfDevice& own, const Call& call,
                        int pair);
  void prepare(c10::Device device, int pair, bool captured, const char* call);
  void meet(c10::Device device, int pair);
  void compile(DeviceLaunch& launch, const c10::Stream& stream);
  void issue(DeviceLaunch& launch, OfDevice& own, int pair, bool captured, InFlightCall& flight);

  const WatchdogConfig config_;
  const c10::intrusive_ptr<Options> options_;
  const std::uint64_t forkGeneration_;
  const std::unique_ptr<DeviceLibrary> library_;
  const std::shared_ptr<Watchdog> watchdog_;
  std::atomic<bool> shutDown_{false};

  mutable std::mutex preparedMutex_;
  std::set<std::pair<c10::DeviceIndex, int>> prepared_;  // existing communicators
  std::optional<c10::Device> bound_;
  std::optional<c10::Device> last_;   // of the last call
  std::optional<c10::Device> first_;  // of which the ranks of the host compare the calls
  std::map<c10::DeviceIndex, OfDevice> devices_;

  // Held while calls are put on streams: their order and numbers must be equal on all ranks.
  std::mutex launchMutex_;
};

}  // namespace fastcoll
