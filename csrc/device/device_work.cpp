#include "device_work.hpp"

#include <ATen/core/ivalue.h>
#include <ATen/core/ivalue_inl.h>
#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>

#include "../base/interrupt.hpp"
#include "../torch_error.hpp"

namespace fastcoll {
namespace {

// Between two looks of a waiting host: short beside what a collective on a device takes.
constexpr std::chrono::microseconds kFirstPause{20};
constexpr std::chrono::microseconds kLastPause{1000};

}  // namespace

std::exception_ptr DeviceWork::exception() const {
  return translatedFault(flight_->fault());
}

void DeviceWork::synchronize() {
  if (auto fault = exception()) std::rethrow_exception(fault);
  const c10::impl::VirtualGuardImpl impl(flight_->device.type());
  const c10::Stream current = impl.getStream(flight_->device);
  if (current != stream_) flight_->blockOn(current);
  // From here on the caller's stream keeps the order that the kept tensors stood for.
  flight_->letGo();
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  synchronize();
  if (timeout == kNoTimeout && !blocking_) return true;
  if (flight_->captured()) return true;
  const auto until =
      timeout == kNoTimeout ? TimePoint::max() : deadlineAfter(Clock::now(), timeout);
  auto pause = kFirstPause;
  while (!flight_->ended()) {
    if (Clock::now() >= until) {
      throwAsTorch(
          Error(ErrorKind::Timeout,
                concat("fastcoll.wait: Timed out after ", timeout.count(), " ms waiting for ",
                       flight_->describe(), "; it goes on, and may be waited for again")));
    }
    translated([] { checkInterrupt(); });
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLastPause);
  }
  if (auto fault = exception()) std::rethrow_exception(fault);
  return true;
}

void DeviceWork::abort() {
  throwAsTorch(Error(ErrorKind::Value,
                     "fastcoll: one work cannot be aborted alone; abort its group with "
                     "torch.distributed.distributed_c10d._abort_process_group()"));
}

/// Completed from the start: whoever reads its value waits, by stream, for the device.
c10::intrusive_ptr<c10::ivalue::Future> DeviceWork::getFuture() {
  const std::lock_guard<std::mutex> lock(futureMutex_);
  if (future_ != nullptr) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{flight_->device});
  if (auto fault = exception()) {
    future_->setError(fault);
  } else {
    // It records events on the streams that are current.
    const c10::StreamGuard guard(stream_);
    future_->markCompleted(c10::IValue(outputs_));
  }
  return future_;
}

}  // namespace fastcoll
