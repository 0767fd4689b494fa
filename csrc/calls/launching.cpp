// Turns a call of torch into a task of an engine. The caller runs it, or gets a work.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include "process_group.hpp"
#include "torch/work_registry.hpp"

namespace fastcoll {

void ProcessGroupFastcoll::stopCollecting() {
  std::lock_guard<std::mutex> lock(coalescingMutex_);
  if (coalescingThread_.load() != std::this_thread::get_id()) return;
  coalescingThread_ = std::thread::id();
  coalesced_.clear();
  for (const DeviceCall& call : batch_) trace::fail(call.trace, "the batch was discarded", false);
  batch_.clear();
}

bool ProcessGroupFastcoll::collecting(WorkRef& work) {
  if (coalescingThread_.load() != std::this_thread::get_id()) return false;
  std::lock_guard<std::mutex> lock(coalescingMutex_);
  if (work != nullptr) coalesced_.push_back(std::move(work));
  work = nullptr;
  return true;
}

WorkRef ProcessGroupFastcoll::launch(std::shared_ptr<TensorTask> task, Call call) {
  const CallType& type = *task->site.type;
  task->countsChanges = countsAllChanges_ || type.countsChanges == CountsChanges::Always ||
                        (type.countsChanges == CountsChanges::OnCpu && !task->onDevice());
  if (task->onDevice()) return launchOnDevice(std::move(task), std::move(call));
  WorkTerms terms = termsOf(call.timeout);  // lives to the end of a call that makes no work
  task->request.timeout = terms.timeout;
  trace::Record draft;
  describe(draft, *task, call);
  task->draft = draft.group == 0 ? nullptr : &draft;
  const bool profiled = at::hasCallbacks();
  const bool coalescing = coalescingThread_.load() == std::this_thread::get_id();
  if (!call.async && !profiled && !coalescing && !listsWorks()) {
    engine_->runInline(task);
    return nullptr;
  }
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
