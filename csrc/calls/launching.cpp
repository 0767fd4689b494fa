// Turns a call of torch into a task of an engine. The caller runs the task, gets a work, or gets
// the task prepared for repetition.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include "base/entry_lock.hpp"
#include "calls/prepared.hpp"
#include "torch/work_registry.hpp"

namespace fastcoll {

thread_local ProcessGroupFastcoll::Prepared* ProcessGroupFastcoll::preparing_ = nullptr;

std::shared_ptr<ProcessGroupFastcoll::Prepared> ProcessGroupFastcoll::prepare(
    const std::function<void()>& call) {
  auto prepared = std::make_shared<Prepared>();
  preparing_ = prepared.get();
  try {
    call();
  } catch (...) {
    preparing_ = nullptr;
    throw;
  }
  preparing_ = nullptr;
  if (!prepared->messages.empty()) return prepared;
  // A barrier behind a stream cannot be prepared: each run waits for a later point of the stream.
  if (prepared->task == nullptr || prepared->task->before) return nullptr;
  describe(prepared->draft, *prepared->task, prepared->call);
  return prepared;
}

bool ProcessGroupFastcoll::canRun(const Prepared& prepared) const {
  translated([&] {
    for (const auto& place : prepared.places) {
      if (place.tensor.const_data_ptr() == place.address && place.tensor.nbytes() == place.bytes) {
        continue;
      }
      const bool sends = !prepared.messages.empty();
      const TensorTask& task = sends ? *prepared.messages[0].op->task : *prepared.task;
      throw Error(ErrorKind::Value, task.site.errorSite(),
                  "a tensor of the plan has left its memory (it was resized or set). Make "
                  "the plan anew.");
    }
  });
  if (at::hasCallbacks()) return false;  // the profiler needs a work
  if (prepared.task == nullptr) {
    if (collects()) return false;
    for (const auto& message : prepared.messages) {
      if (message.op.use_count() != 1) return false;  // a thread still ends its last run
    }
    std::atomic_thread_fence(std::memory_order_acquire);  // use_count() is relaxed
    return true;
  }
  // A barrier waits for the stream of a device that the group has used.
  return prepared.task->request.collective != Collective::Barrier || !usesDevice_.load();
}

void ProcessGroupFastcoll::run(Prepared& prepared) {
  if (!prepared.messages.empty()) return runMessages(prepared);
  TensorTask& task = *prepared.task;
  const WorkTerms terms = termsOf(prepared.call.timeout);
  task.request.timeout = terms.timeout;
  prepared.draft.timeoutMillis = terms.timeout.count();
  if (prepared.draft.group != 0) trace::describe(prepared.draft);
  task.draft = prepared.draft.group == 0 ? nullptr : &prepared.draft;
  translated([&] { engine_->runInline(prepared.task); });
}

void ProcessGroupFastcoll::stopCollecting() {
  std::lock_guard<std::mutex> lock(coalescingMutex_);
  if (!collects()) return;
  coalescingThread_ = std::thread::id();
  coalesced_.clear();
  for (const DeviceCall& call : batch_) trace::fail(call.trace, "the batch was discarded", false);
  batch_.clear();
}

bool ProcessGroupFastcoll::collecting(WorkRef& work) {
  if (!collects()) return false;
  std::lock_guard<std::mutex> lock(coalescingMutex_);
  if (work != nullptr) coalesced_.push_back(std::move(work));
  work = nullptr;
  return true;
}

WorkRef ProcessGroupFastcoll::launch(std::shared_ptr<TensorTask> task, Call call) {
  const CallType& type = *task->site.type;
  task->countsChanges = countsAllChanges_ || type.countsChanges == CountsChanges::Always ||
                        (type.countsChanges == CountsChanges::OnCpu && !task->onDevice());
  if (preparing_ != nullptr) {
    if (task->onDevice()) return nullptr;
    for (const Tensors* tensors : {&call.inputs, &call.outputs}) {
      for (const at::Tensor& tensor : *tensors) preparing_->keep(tensor);
    }
    preparing_->task = std::move(task);
    preparing_->call = std::move(call);
    return nullptr;
  }
  if (task->onDevice()) return launchOnDevice(std::move(task), std::move(call));
  WorkTerms terms = termsOf(call.timeout);  // lives to the end of a call that makes no work
  task->request.timeout = terms.timeout;
  trace::Record draft;
  describe(draft, *task, call);
  task->draft = draft.group == 0 ? nullptr : &draft;
  const bool profiled = at::hasCallbacks();
  const bool coalescing = collects();
  if (!call.async && !profiled && !coalescing && !listsWorks()) {
    engine_->runInline(task);
    return nullptr;
  }
  beforeWait();
  if (profiled) {
    recordParameters(call, collectiveName(task->request.collective), engine_->sequence() + 1,
                     false);
  }
  auto work = c10::make_intrusive<CollectiveWork>(rank_, type.type, type.title,
                                                  std::optional<Tensors>(std::move(call.inputs)),
                                                  std::move(call.outputs), 0, std::move(terms));
  if (!call.async && !coalescing) {
    // Inline, but with a work: the profiler records its span, or torch lists it.
    try {
      engine_->runInline(task);
    } catch (...) {
      work->markDone(std::current_exception());
      throw;
    }
    work->setSequence(task->request.seq);
    work->markDone(nullptr);
    return work;
  }
  task->completion = {work.get(), [work](Completion*) {}};  // keeps the work
  work->attach(engine_);
  try {
    work->setSequence(engine_->submit(std::move(task)));
  } catch (...) {
    work->markDone(std::current_exception());
    throw;
  }
  WorkRef result = work;
  if (coalescing) collecting(result);
  return result;
}

void ProcessGroupFastcoll::recordParameters(const Call& call, const char* name, std::uint64_t seq,
                                            bool pointToPoint) const {
  int64_t in = 0;
  int64_t out = 0;
  for (const auto& tensor : call.inputs) in += tensor.numel();
  for (const auto& tensor : call.outputs) out += tensor.numel();
  const auto type = call.inputs.empty() ? at::kByte : call.inputs[0].scalar_type();
  RECORD_PARAM_COMMS_DATA(std::make_tuple(static_cast<int64_t>(seq), pointToPoint),
                          std::make_tuple(pg_uid_, pg_desc_), call.inputs, call.outputs, rank_,
                          name, in, out, type, std::vector<int64_t>(), std::vector<int64_t>(), -1,
                          -1, size_);
}

}  // namespace fastcoll
