#include "cuda/device_work.hpp"

#include <ATen/core/ivalue.h>
#include <ATen/core/ivalue_inl.h>
#include <ATen/core/jit_type.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "cuda/host_wait.hpp"
#include "cuda/watchdog.hpp"
#include "torch/error.hpp"
#include "torch/work_registry.hpp"

namespace fastcoll {

DeviceWork::DeviceWork(int rank, const Call& first, InFlightRef flight,
                       std::vector<at::Tensor> outputs, bool blocking)
    : c10d::Work(rank, first.batched ? c10d::OpType::COALESCED : first.site.type->type,
                 first.batched || !at::hasCallbacks() ? nullptr : first.site.type->title,
                 first.inputs),
      outputs_(std::move(outputs)),
      flight_(std::move(flight)),
      blocking_(blocking) {
  // The profiler's span covers issuing only; the device's own events show the rest.
  if (recordFunctionEndCallback_) recordFunctionEndCallback_();
}

std::exception_ptr DeviceWork::exception() const {
  return translatedFault(flight_->fault());
}

/// An aborted call has passed on its device without a result. Waits for its error, which comes
/// later.
void DeviceWork::throwIfFailed() const {
  if (flight_->failing()) {
    const auto until = deadlineAfter(Clock::now(), kLongestFailure);
    if (!translated(
            [&] { return waitOnHost([this] { return flight_->fault() != nullptr; }, until); })) {
      throwAsTorch(Error(ErrorKind::Backend, concat("fastcoll: the group of ", flight_->describe(),
                                                    " has failed. Read the log for the reason.")));
    }
  }
  if (auto fault = exception()) std::rethrow_exception(fault);
}

void DeviceWork::synchronize() {
  throwIfFailed();
  const c10::impl::VirtualGuardImpl impl(flight_->device().type());
  const c10::Stream current = impl.getStream(flight_->device());
  if (current != *flight_->stream) flight_->blockOn(current);
  // From here on that stream orders the reuse of the kept tensors' memory, if it owns that memory.
  if (current == flight_->callers) flight_->unstash();
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  synchronize();
  if ((timeout != kNoTimeout || blocking_) && !flight_->captured()) {
    const auto limit =
        timeout == kNoTimeout ? TimePoint::max() : deadlineAfter(Clock::now(), timeout);
    if (!waitOnHost([this] { return flight_->ended(); }, limit)) {
      throwAsTorch(Error(
          ErrorKind::Timeout,
          concat("fastcoll.wait: Timed out after ", timeout.count(), " ms waiting for ",
                 flight_->describe(), ". The operation is still running. Call wait() again.")));
    }
    if (auto fault = exception()) std::rethrow_exception(fault);
  }
  unregisterWork(*this);
  return true;
}

float DeviceWork::getDuration() const {
  return translated([this] { return flight_->milliseconds(); });
}

void DeviceWork::abort() {
  throwAsTorch(Error(ErrorKind::Value,
                     "fastcoll: one work cannot be aborted alone; abort its group with "
                     "torch.distributed.distributed_c10d._abort_process_group()"));
}

/// Completed from the start: a reader of its value waits for the device by its stream.
c10::intrusive_ptr<c10::ivalue::Future> DeviceWork::getFuture() {
  const std::lock_guard<std::mutex> lock(futureMutex_);
  if (future_ != nullptr) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{flight_->device()});
  try {
    throwIfFailed();
  } catch (...) {
    future_->setError(std::current_exception());
    return future_;
  }
  {
    // markCompleted() records events on the current streams.
    const c10::StreamGuard guard(*flight_->stream);
    future_->markCompleted(c10::IValue(outputs_));
  }
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> DeviceWork::getFutureResult() {
  const std::lock_guard<std::mutex> lock(futureMutex_);
  if (result_ != nullptr) return result_;
  if (flight_->captured()) {
    throwAsTorch(
        Error(ErrorKind::Value, concat("fastcoll: ", flight_->describe(),
                                       " was captured into a graph, and its replays have no "
                                       "result. Synchronize the stream of the replay.")));
  }
  result_ = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  flight_->whenEnded([flight = InFlightRef(flight_), result = result_] {
    auto value = c10d::WorkResult::SUCCESS;
    if (const auto fault = flight->fault()) {
      value = c10d::WorkResult::COMM_ERROR;
      try {
        std::rethrow_exception(fault);
      } catch (const Error& error) {
        if (error.kind() == ErrorKind::Timeout) value = c10d::WorkResult::TIMEOUT;
      } catch (...) {
      }
    }
    result->markCompleted(c10::IValue(static_cast<int64_t>(value)));
  });
  return result_;
}

}  // namespace fastcoll
