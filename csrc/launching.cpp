// Turns a call of torch into a task of an engine. The caller runs it, or gets a work.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include <algorithm>

#include "call_checks.hpp"
#include "process_group.hpp"
#include "reduce/reduce.hpp"
#include "work_registry.hpp"

namespace fastcoll {

std::shared_ptr<TensorTask> ProcessGroupFastcoll::newTask(const CallSite& site,
                                                          Collective collective) const {
  auto task = std::make_shared<TensorTask>(site);
  task->request.collective = collective;
  return task;
}

void ProcessGroupFastcoll::setReduction(const CallSite& site, TensorTask& task, Request& request,
                                        const c10d::ReduceOp& op) const {
  const bool onDevice = task.device() && !task.device()->is_cpu();
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      request.op = ReduceOp::Sum;
      break;
    case c10d::ReduceOp::AVG:
      request.op = ReduceOp::Avg;
      break;
    case c10d::ReduceOp::PRODUCT:
      request.op = ReduceOp::Product;
      break;
    case c10d::ReduceOp::MIN:
      request.op = ReduceOp::Min;
      break;
    case c10d::ReduceOp::MAX:
      request.op = ReduceOp::Max;
      break;
    case c10d::ReduceOp::BAND:
      request.op = ReduceOp::BitAnd;
      break;
    case c10d::ReduceOp::BOR:
      request.op = ReduceOp::BitOr;
      break;
    case c10d::ReduceOp::BXOR:
      request.op = ReduceOp::BitXor;
      break;
    case c10d::ReduceOp::PREMUL_SUM: {
      request.op = ReduceOp::PreMulSum;
      const auto* supplement =
          dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (supplement == nullptr) {
        throw Error(ErrorKind::Value, site.prefix() +
                                          "expected PREMUL_SUM with a factor, got none. Make the "
                                          "operation with torch's _make_nccl_premul_sum(factor).");
      }
      const at::Tensor& factor = supplement->tensor_factor;
      if (!factor.defined()) {
        request.factor = supplement->double_factor;
      } else if (onDevice && factor.device() == *task.device()) {
        // The library reads it on the device, so the host need not wait for it.
        const DType type = partOf(request.dtype);
        if (factor.numel() != 1 || dtypeOf(factor.scalar_type()) != type) {
          throw Error(ErrorKind::Type, concat(site.prefix(), "expected a factor of one element of ",
                                              dtypeName(type), ", got ", factor.numel(), " of ",
                                              dtypeName(dtypeOf(factor.scalar_type()))));
        }
        task.keepAlive(factor);
        request.factorOnDevice = factor.const_data_ptr();
      } else {
        request.factor = factor.item<double>();
      }
      break;
    }
    default:
      throw Error(ErrorKind::Value, site.prefix() +
                                        "expected a reduction of ReduceOp.SUM, AVG, "
                                        "PRODUCT, MIN, MAX, BAND, BOR, BXOR or "
                                        "PREMUL_SUM, got operation " +
                                        std::to_string(static_cast<int>(op.op_)));
  }
  if (onDevice) return;  // the library checks it
  named(site, [&] { reduceFunction(request.dtype, request.op); });
}

void ProcessGroupFastcoll::checkRank(const CallSite& site, const char* what, int rank) const {
  if (rank < 0 || rank >= size_) {
    throw Error(ErrorKind::Value, concat(site.prefix(), "expected a ", what, " from 0 to ",
                                         size_ - 1, ", got ", rank));
  }
}

int ProcessGroupFastcoll::checkRoot(const CallSite& site, int64_t root, int64_t rootTensor) const {
  checkRank(site, "root rank", static_cast<int>(root));
  if (rootTensor != 0) {
    throw Error(ErrorKind::Value, concat(site.prefix(), "expected a root tensor of 0, got ",
                                         rootTensor, ": each rank gives one tensor"));
  }
  return static_cast<int>(root);
}

void ProcessGroupFastcoll::stopCollecting() {
  std::lock_guard<std::mutex> lock(coalescingMutex_);
  if (coalescingThread_ != std::this_thread::get_id()) return;
  coalescingThread_ = std::thread::id();
  coalesced_.clear();
  for (const DeviceCall& call : batch_) trace::fail(call.trace, "the batch was discarded", false);
  batch_.clear();
}

bool ProcessGroupFastcoll::collecting(WorkRef& work) {
  std::lock_guard<std::mutex> lock(coalescingMutex_);
  if (coalescingThread_ != std::this_thread::get_id()) return false;
  if (work != nullptr) coalesced_.push_back(std::move(work));
  work = nullptr;
  return true;
}

namespace {

/// Completes a work.
class WorkCompletion : public Completion {
 public:
  explicit WorkCompletion(c10::intrusive_ptr<CollectiveWork> work) : work_(std::move(work)) {}
  void complete(std::exception_ptr ended) noexcept override {
    std::exchange(work_, nullptr)->markDone(std::move(ended));
  }
  bool callsBack() override { return work_->callsBack(); }

 private:
  c10::intrusive_ptr<CollectiveWork> work_;
};

}  // namespace

ProcessGroupFastcoll::WorkRef ProcessGroupFastcoll::launch(std::shared_ptr<TensorTask> task,
                                                           Call call) {
  task->countsChanges = countsAllChanges_ || task->countsChangesInStock(call.type);
  if (task->device() && !task->device()->is_cpu()) {
    return launchOnDevice(std::move(task), std::move(call));
  }
  WorkTerms terms = termsOf(call.timeout);  // lives to the end of a call that makes no work
  task->request.timeout = terms.timeout;
  trace::Record draft;
  describe(draft, *task, call);
  task->draft = draft.group == 0 ? nullptr : &draft;
  const bool profiled = at::hasCallbacks();
  WorkRef none;
  const bool coalescing = collecting(none);
  if (!call.async && !profiled && !coalescing && !listsWorks()) {
    engine_->runInline(task);
    return nullptr;
  }
  if (profiled) {
    recordParameters(call, collectiveName(task->request.collective), engine_->sequence() + 1,
                     false);
  }
  auto work = c10::make_intrusive<CollectiveWork>(rank_, call.type, call.title,
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
  task->completion = std::make_shared<WorkCompletion>(work);
  work->attach(engine_, task->completion);
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
