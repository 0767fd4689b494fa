// Three ways to execute a checked call: run it, submit it, or keep it as a plan that is repeated.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include "base/entry_lock.hpp"
#include "calls/message.hpp"
#include "process_group.hpp"
#include "torch/work_registry.hpp"

namespace fastcoll {

// --- once ----------------------------------------------------------------------------------------

WorkRef ProcessGroupFastcoll::start(const CallRef& call) {
  WorkRef work;
  if (call->request.collective == Collective::Barrier) call->before = behindDevice(*call);
  describe(*call);
  if (call->onDevice()) {
    DeviceLaunch launch{{call}};
    work = launchOnDevice(launch);
  } else {
    work = call->isMessage() ? startMessage(std::static_pointer_cast<MessageCall>(call))
                             : startCollective(call);
  }
  if (!collects()) return work;
  if (work != nullptr) batch_.add(std::move(work));
  return nullptr;
}

WorkRef ProcessGroupFastcoll::startCollective(const CallRef& call) {
  WorkTerms terms = termsOf(call->timeout);  // lives to the end of a call that makes no work
  call->request.timeout = terms.timeout;
  const bool profiled = at::hasCallbacks();
  const bool coalescing = collects();
  if (!call->async && !profiled && !coalescing && !listsWorks()) {
    engine_->runInline(call);
    return nullptr;
  }
  beforeWait();
  if (profiled) {
    recordParameters(*call, call->inputs, call->outputs, collectiveName(call->request.collective),
                     engine_->sequence() + 1);
  }
  const CallType& type = *call->site.type;
  auto work = c10::make_intrusive<CollectiveWork>(rank_, type.type, type.title,
                                                  std::optional<Tensors>(std::move(call->inputs)),
                                                  std::move(call->outputs), 0, std::move(terms));
  if (!call->async && !coalescing) {
    // Inline, but with a work: the profiler records its span, or torch lists it.
    try {
      engine_->runInline(call);
    } catch (...) {
      work->markDone(std::current_exception());
      throw;
    }
    work->setSequence(call->request.seq);
    work->markDone(nullptr);
    return work;
  }
  call->completion = {work.get(), [work](Completion*) {}};  // keeps the work
  work->attach(engine_);
  try {
    work->setSequence(engine_->submit(call));
  } catch (...) {
    work->markDone(std::current_exception());
    throw;
  }
  return work;
}

void ProcessGroupFastcoll::monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) {
  translated([&] {
    const trace::RecordId record = trace_->monitoredBarrier(timeoutOr(opts.timeout));
    try {
      engine_->monitoredBarrier(timeoutOr(opts.timeout), waitAllRanks);
    } catch (...) {
      trace::fail(record, std::current_exception(), engine_->faulted());
      throw;
    }
    trace::complete(record);
  });
}

WorkRef ProcessGroupFastcoll::runNow(const Calls& calls) {
  return calls.call->isMessage() ? runMessages(calls) : start(calls.call);
}

// --- many times ----------------------------------------------------------------------------------

Plan::Plan(Calls of) : calls(std::move(of)) {
  if (calls.call->onDevice()) onDevice.calls = {calls.call};
  const auto keep = [this](const at::Tensor& tensor) {
    places.push_back({tensor, tensor.const_data_ptr(), tensor.nbytes()});
  };
  for (const CallRef& call : {calls.call, calls.receive}) {
    if (call == nullptr) continue;
    if (call->isMessage()) {
      auto& message = static_cast<MessageCall&>(*call);
      message.repeats = true;
      keep(message.tensor);
    }
    for (const at::Tensor& tensor : call->inputs) keep(tensor);
    for (const at::Tensor& tensor : call->outputs) keep(tensor);
  }
}

std::shared_ptr<Plan> ProcessGroupFastcoll::planOf(const Calls& calls) {
  for (const CallRef& call : {calls.call, calls.receive}) {
    if (call == nullptr) continue;
    if (call->onDevice() && call->isMessage()) return nullptr;
    describe(*call);
  }
  return std::make_shared<Plan>(calls);
}

bool ProcessGroupFastcoll::canRepeat(const Plan& plan) const {
  const Call& call = *plan.calls.call;
  for (const auto& place : plan.places) {
    if (place.tensor.const_data_ptr() == place.address && place.tensor.nbytes() == place.bytes) {
      continue;
    }
    throwAsTorch(Error(ErrorKind::Value, call.site.errorSite(),
                       "a tensor of the plan has left its memory (it was resized or set). Make "
                       "the plan anew."));
  }
  if (at::hasCallbacks()) return false;  // the profiler needs a work
  if (call.onDevice()) return !collects() && !options_->blockingWait && !listsWorks();
  if (call.isMessage()) {
    if (collects()) return false;
    for (const CallRef* message : {&plan.calls.call, &plan.calls.receive}) {
      if (message->use_count() > 1) return false;  // a thread still ends its last run
    }
    std::atomic_thread_fence(std::memory_order_acquire);  // use_count() is relaxed
    return true;
  }
  // A barrier waits for the stream of a device that the group has used.
  return call.request.collective != Collective::Barrier || !device_->isMade();
}

void ProcessGroupFastcoll::repeat(Plan& plan) {
  translated([&] {
    const CallRef& call = plan.calls.call;
    if (call->isMessage()) return repeatMessages(plan);
    call->draft.timeoutMillis = timeoutOr(call->timeout).count();
    if (call->draft.group != 0) trace::describe(call->draft);
    if (call->onDevice()) {
      launchOnDevice(plan.onDevice);  // makes no work, see canRepeat()
      return;
    }
    const WorkTerms terms = termsOf(call->timeout);
    call->request.timeout = terms.timeout;
    engine_->runInline(call);
  });
}

void ProcessGroupFastcoll::recordParameters(const Call& call, const Tensors& inputs,
                                            const Tensors& outputs, const char* name,
                                            std::uint64_t seq) const {
  int64_t in = 0;
  int64_t out = 0;
  for (const auto& tensor : inputs) in += tensor.numel();
  for (const auto& tensor : outputs) out += tensor.numel();
  const auto type = inputs.empty() ? at::kByte : inputs[0].scalar_type();
  RECORD_PARAM_COMMS_DATA(std::make_tuple(static_cast<int64_t>(seq), call.isMessage()),
                          std::make_tuple(pg_uid_, pg_desc_), inputs, outputs, rank_, name, in, out,
                          type, std::vector<int64_t>(), std::vector<int64_t>(), -1, -1, size_);
}

}  // namespace fastcoll
