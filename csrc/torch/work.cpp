#include "torch/work.hpp"

#include <ATen/core/ivalue.h>
#include <ATen/core/ivalue_inl.h>
#include <ATen/core/jit_type.h>

#include "base/worker_pool.hpp"
#include "torch/error.hpp"
#include "torch/work_registry.hpp"

namespace fastcoll {

bool WorkFastcoll::wait(std::chrono::milliseconds timeout) {
  if (const auto engine = isCompleted() ? nullptr : this->engine()) {
    if (timeout == kNoTimeout) {
      waitForTransfer(*engine, std::nullopt);
    } else if (!waitForTransfer(*engine, deadlineAfter(Clock::now(), timeout))) {
      throwAsTorch(Error(ErrorKind::Timeout, "fastcoll.wait [seq ", seq_, "]: Timed out after ",
                         timeout.count(), " ms waiting for ", describe(),
                         ". The operation is still running. Call wait() again."));
    }
  }
  if (auto fault = exception()) std::rethrow_exception(fault);
  unregisterWork(*this);
  return true;
}

void WorkFastcoll::abort() {
  throwAsTorch(Error(ErrorKind::Value,
                     "fastcoll: one work cannot be aborted alone; abort its group with "
                     "torch.distributed.distributed_c10d._abort_process_group()"));
}

void WorkFastcoll::markDone(std::exception_ptr fault) noexcept {
  fault = translatedFault(fault);
  if (terms_.timed) ended_ = Clock::now();
  terms_.extension.reset();
  finish(fault);
  transferEnded();
  {
    std::shared_ptr<CpuEngine> last;  // freed outside the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    last.swap(engine_);
  }
  Future outputs;
  Future result;
  {
    std::lock_guard<std::mutex> lock(futureMutex_);
    resolved_ = true;
    outputs = future_;
    result = futureResult_;
  }
  if (!outputs && !result) return;
  // Without locks: callbacks may issue collectives, or use this very work.
  const auto tell = [self = c10::intrusive_ptr<WorkFastcoll>::unsafe_reclaim_from_nonowning(this),
                     outputs, result, fault] { self->resolve(outputs, result, fault); };
  if (settled_) {
    // A callback may wait for an operation that only this thread would run.
    try {
      return runOnWorker(tell);
    } catch (...) {
      // No thread can be started, so run it here.
    }
  }
  tell();
}

void WorkFastcoll::resolve(const Future& outputs, const Future& result,
                           const std::exception_ptr& fault) const {
  if (outputs && fault) outputs->setError(fault);
  if (outputs && !fault) outputs->markCompleted(c10::IValue(outputs_));
  if (!result) return;
  result->markCompleted(c10::IValue(
      static_cast<int64_t>(fault ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS)));
}

bool WorkFastcoll::isResolvedBefore(Future& future, const c10::TypePtr& type) {
  const std::lock_guard<std::mutex> lock(futureMutex_);
  if (future) return false;
  future = c10::make_intrusive<c10::ivalue::Future>(type);
  return resolved_;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkFastcoll::getFuture() {
  const auto type = c10::ListType::create(c10::TensorType::get());
  if (isResolvedBefore(future_, type)) resolve(future_, nullptr, exception());
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkFastcoll::getFutureResult() {
  if (isResolvedBefore(futureResult_, c10::IntType::get())) {
    resolve(nullptr, futureResult_, exception());
  }
  return futureResult_;
}

float WorkFastcoll::getDuration() const {
  const bool ended = [this] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return completed_;
  }();
  if (!terms_.timed || !ended) {
    throwAsTorch(Error(ErrorKind::Value, "fastcoll: ", describe(), " (seq ", seq_, ", rank ", rank_,
                       ")",
                       terms_.timed ? " is still running. Call wait() first."
                                    : " was not timed. Switch timing on before the call: "
                                      "group._enable_collectives_timing()."));
  }
  return std::chrono::duration<float, std::milli>(ended_ - started_).count();
}

bool CollectiveWork::waitForTransfer(CpuEngine& engine, std::optional<TimePoint> until) {
  if (until) return engine.waitUntil(*this, *until);
  engine.wait(*this);
  return true;
}

bool PointToPointWork::isCompleted() {
  if (c10d::Work::isCompleted()) return true;
  if (const auto engine = this->engine()) engine->pointToPoint().poll();
  return c10d::Work::isCompleted();
}

bool PointToPointWork::waitForTransfer(CpuEngine& engine, std::optional<TimePoint> until) {
  return translated(
      [&] { return engine.pointToPoint().wait(op_, until.value_or(TimePoint::max())); });
}

CombinedWork::CombinedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works,
                           std::vector<at::Tensor> outputs, std::chrono::milliseconds timeout)
    : WorkFastcoll(rank, c10d::OpType::COALESCED, nullptr, std::nullopt, std::move(outputs), 0,
                   {timeout, false, nullptr}),
      works_(std::move(works)) {}

bool CombinedWork::isCompleted() {
  bool all = true;
  for (const auto& work : works_) all = work->isCompleted() && all;
  return all;
}

bool CombinedWork::isSuccess() const {
  return std::ranges::all_of(works_, [](const auto& work) { return work->isSuccess(); });
}

std::exception_ptr CombinedWork::exception() const {
  for (const auto& work : works_) {
    if (auto fault = work->exception()) return fault;
  }
  return nullptr;
}

bool CombinedWork::wait(std::chrono::milliseconds timeout) {
  const auto end = deadlineAfter(Clock::now(), timeout);
  for (const auto& work : works_) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
    work->wait(timeout > kNoTimeout ? std::max(left, std::chrono::milliseconds{1}) : timeout);
  }
  unregisterWork(*this);
  return true;
}

float CombinedWork::getDuration() const {
  float longest = 0;
  for (const auto& work : works_) longest = std::max(longest, work->getDuration());
  return longest;
}

c10::intrusive_ptr<c10::ivalue::Future> CombinedWork::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  for (const auto& work : works_) futures.push_back(work->getFuture());
  auto outputs = outputs_;
  return c10::collectAll(futures)->then(
      [outputs](c10::ivalue::Future& all) {
        if (all.hasError()) std::rethrow_exception(all.exception_ptr());
        return c10::IValue(outputs);
      },
      c10::ListType::create(c10::TensorType::get()));
}

}  // namespace fastcoll
