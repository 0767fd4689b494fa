// The work of a call on device tensors. The call ends on the device, not on the host: wait() makes
// the caller's stream wait, and returns at once.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <mutex>
#include <vector>

#include "cuda/in_flight.hpp"
#include "torch/device_engine.hpp"
#include "torch/torch_version.hpp"

namespace fastcoll {

class DeviceWork : public c10d::Work {
 public:
  /// `outputs`: the value of its future. `blocking`, from the group's options: wait() waits on the
  /// host.
  DeviceWork(int rank, const Call& first, InFlightRef flight, std::vector<at::Tensor> outputs,
             bool blocking);

  bool isCompleted() override { return flight_->ended(); }
  bool isSuccess() const override { return flight_->ended() && flight_->fault() == nullptr; }
  std::exception_ptr exception() const override;
  /// With a timeout, or blocking: waits on the host, and throws if the call does not end in time.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  /// Makes the caller's current stream wait for the end.
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  void abort() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  /// Completed with a c10d::WorkResult when the watchdog sees the end.
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  std::uint64_t getSequencenumber() const override { return flight_->seq; }
  std::chrono::milliseconds getTimeout() const FASTCOLL_OVERRIDES_2_14 { return flight_->timeout; }
  float getDuration() const override;

 private:
  void throwIfFailed() const;

  std::vector<at::Tensor> outputs_;
  InFlightRef flight_;
  const bool blocking_;
  std::mutex futureMutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::intrusive_ptr<c10::ivalue::Future> result_;
};

}  // namespace fastcoll
