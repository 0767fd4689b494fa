// Turns a call of torch into a task of an engine. The caller runs the task, gets a work, or gets
// the task prepared for repetition.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include "base/entry_lock.hpp"
#include "process_group.hpp"
#include "torch/work_registry.hpp"

namespace fastcoll {

struct ProcessGroupFastcoll::Prepared {
  /// A tensor of the call, and where it was. A tensor that is resized leaves its memory.
  struct Place {
    at::Tensor tensor;
    const void* address;
    std::size_t bytes;
  };

  explicit Prepared(std::shared_ptr<TensorTask> given, Call of)
      : task(std::move(given)), call(std::move(of)) {
    for (const Tensors* tensors : {&call.inputs, &call.outputs}) {
      for (const at::Tensor& tensor : *tensors) {
        places.push_back({tensor, tensor.const_data_ptr(), tensor.nbytes()});
      }
    }
  }

  std::shared_ptr<TensorTask> task;
  Call call;
  trace::Record draft;
  std::vector<Place> places;
};

namespace {

/// While set, launch() stores this thread's collective here and does not run it.
thread_local std::shared_ptr<ProcessGroupFastcoll::Prepared>* preparing = nullptr;

}  // namespace

std::shared_ptr<ProcessGroupFastcoll::Prepared> ProcessGroupFastcoll::prepare(
    const std::function<void()>& call) {
  std::shared_ptr<Prepared> prepared;
  preparing = &prepared;
  try {
    call();
  } catch (...) {
    preparing = nullptr;
    throw;
  }
  preparing = nullptr;
  // A barrier behind a stream cannot be prepared: each run waits for a later point of the stream.
  if (prepared->task->onDevice() || prepared->task->before) return nullptr;
  describe(prepared->draft, *prepared->task, prepared->call);
  return prepared;
}

bool ProcessGroupFastcoll::canRun(const Prepared& prepared) const {
  translated([&] {
    for (const auto& place : prepared.places) {
      if (place.tensor.const_data_ptr() == place.address && place.tensor.nbytes() == place.bytes) {
        continue;
      }
      throw Error(ErrorKind::Value, prepared.task->site.prefix(),
                  "a tensor of the plan has left its memory (it was resized or set). Make "
                  "the plan anew.");
    }
  });
  if (at::hasCallbacks()) return false;  // the profiler needs a work
  // A barrier waits for the stream of a device that the group has used.
  return prepared.task->request.collective != Collective::Barrier || !usesDevice_.load();
}

void ProcessGroupFastcoll::run(Prepared& prepared) {
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
  if (preparing != nullptr) {
    *preparing = std::make_shared<Prepared>(std::move(task), std::move(call));
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
