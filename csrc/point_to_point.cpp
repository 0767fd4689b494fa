// Send, receive and coalescing of ProcessGroupFastcoll.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include "call_checks.hpp"
#include "process_group.hpp"

namespace fastcoll {
namespace {

/// One message. It completes its work when it is done.
class TensorMessage : public PointToPointOp {
 public:
  void complete(std::exception_ptr fault) noexcept override {
    if (!fault && task) {
      try {
        task->finish();
      } catch (...) {
        fault = std::current_exception();
      }
    }
    task.reset();
    if (trace != 0) tellTrace(fault);
    std::exchange(work, nullptr)->markDone(fault);
  }

  std::shared_ptr<MessageNumbers> numbers;  // of receives from any rank
  std::optional<TensorTask> task;           // staging; keeps the tensor alive
  c10::intrusive_ptr<WorkFastcoll> work;

 private:
  void tellTrace(const std::exception_ptr& fault) noexcept {
    if (numbers != nullptr && source >= 0) {
      trace::setMessage(trace, source, numbers->next(false, source, tag, false));
    }
    fault ? trace::fail(trace, fault) : trace::complete(trace);
  }
};

const char* titleOf(bool send, int peer) {
  if (send) return "fastcoll:send";
  return peer == kAnySource ? "fastcoll:recvAnySource" : "fastcoll:recv";
}

c10d::OpType typeOf(bool send, int peer) {
  if (send) return c10d::OpType::SEND;
  return peer == kAnySource ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV;
}

}  // namespace

using WorkRef = ProcessGroupFastcoll::WorkRef;

WorkRef ProcessGroupFastcoll::launchPointToPoint(const CallSite& site, at::Tensor& tensor,
                                                 bool send, int peer, int tag) {
  if (send || peer != kAnySource) {
    checkRank(site, send ? "destination rank" : "source rank", peer);
    if (peer == rank_) {
      throw Error(ErrorKind::Value, site.prefix() +
                                        "expected another rank, got this one. Copy the "
                                        "tensor instead.");
    }
  }
  const auto timeout = options_->timeout;
  if (tensor.defined() && isServed(tensor.device().type())) {
    if (peer == kAnySource) {
      throw Error(ErrorKind::Value,
                  concat(site.prefix(), "expected a source rank for a tensor on ", tensor.device(),
                         ": receives from any rank are for CPU tensors only."));
    }
    auto task = newTask(site, send ? Collective::Send : Collective::Recv);
    task->request.root = peer;
    task->request.dtype = dtypeOf(tensor.scalar_type());
    auto& messages = send ? task->request.in : task->request.out;
    messages.resize(1);
    send ? task->addInput(messages[0], tensor) : task->addOutput(messages[0], tensor);
    return launchOnDevice(std::move(task),
                          {typeOf(send, peer), titleOf(send, peer), true, timeout,
                           send ? Tensors{tensor} : Tensors{}, Tensors{tensor}},
                          peer);
  }
  if (size_ == 1) {
    throw Error(
        ErrorKind::Value,
        site.prefix() + "expected a group of at least 2 ranks, got 1. Copy the tensor instead.");
  }
  const bool profiled = at::hasCallbacks();
  if (profiled) {
    recordParameters({typeOf(send, peer), titleOf(send, peer), true, timeout,
                      send ? Tensors{tensor} : Tensors{}, send ? Tensors{} : Tensors{tensor}},
                     site.name, messages_ + 1, true);
  }
  const trace::RecordId record = tracedMessage(site.name, tensor, send, peer, tag);
  try {
    return launchMessage(site, tensor, send, peer, tag, record);
  } catch (...) {
    trace::fail(record, std::current_exception(), engine_->faulted());
    throw;
  }
}

WorkRef ProcessGroupFastcoll::launchMessage(const CallSite& site, at::Tensor& tensor, bool send,
                                            int peer, int tag, trace::RecordId record) {
  PointToPoint& pointToPoint = engine_->pointToPoint(site.name, messages_ + 1);
  const bool profiled = at::hasCallbacks();
  auto op = std::make_shared<TensorMessage>();
  op->task.emplace(site);
  if (send) {
    op->task->addInput(op->message, tensor);
  } else {
    op->task->addOutput(op->message, tensor);
  }
  op->send = send;
  op->peer = peer;
  op->tag = tag;
  op->dtype = dtypeOf(tensor.scalar_type());
  op->seq = ++messages_;
  op->trace = record;
  if (peer == kAnySource && record != 0) op->numbers = messageNumbers_;
  WorkTerms terms = termsOf(options_->timeout);
  op->timeout = terms.timeout;
  op->deadline = deadlineAfter(Clock::now(), op->timeout);
  // A title makes torch set up its profiler's record, which takes longer than a small message.
  auto work = c10::make_intrusive<PointToPointWork>(
      rank_, typeOf(send, peer), profiled ? titleOf(send, peer) : nullptr,
      profiled ? std::optional<Tensors>(Tensors{tensor}) : std::nullopt,
      send ? Tensors{} : Tensors{tensor}, op->seq, std::move(terms));
  op->task->prepare();
  op->work = work;
  work->attach(engine_, op);
  try {
    pointToPoint.submit(op);
  } catch (...) {
    op->work.reset();  // operation and work hold each other until completion
    throw;
  }
  return work;
}

WorkRef ProcessGroupFastcoll::send(Tensors& tensors, int destination, int tag) {
  return guarded([&]() -> WorkRef {
    const CallSite site = this->site("send");
    at::Tensor& tensor = single(site, tensors);
    WorkRef work = launchPointToPoint(site, tensor, true, destination, tag);
    collecting(work);
    return work;
  });
}

WorkRef ProcessGroupFastcoll::recv(Tensors& tensors, int source, int tag) {
  return guarded([&]() -> WorkRef {
    const CallSite site = this->site("recv");
    at::Tensor& tensor = single(site, tensors);
    checkRank(site, "source rank", source);  // recvAnysource() serves any rank
    WorkRef work = launchPointToPoint(site, tensor, false, source, tag);
    collecting(work);
    return work;
  });
}

WorkRef ProcessGroupFastcoll::recvAnysource(Tensors& tensors, int tag) {
  return guarded([&]() -> WorkRef {
    const CallSite site = this->site("recv");
    at::Tensor& tensor = single(site, tensors);
    WorkRef work = launchPointToPoint(site, tensor, false, kAnySource, tag);
    collecting(work);
    return work;
  });
}

/// On CPU a batch gains nothing from being one work, and collecting it in Python takes longer than
/// a small exchange. Collected calls still work.
bool ProcessGroupFastcoll::supportsCoalescing() const {
  return at::hasCUDA();
}

void ProcessGroupFastcoll::startCoalescing() {
  std::lock_guard<std::mutex> lock(coalescingMutex_);
  coalescingThread_ = std::this_thread::get_id();
  coalesced_.clear();
  batch_.clear();
}

WorkRef ProcessGroupFastcoll::endCoalescing() {
  std::vector<WorkRef> works;
  {
    std::lock_guard<std::mutex> lock(coalescingMutex_);
    coalescingThread_ = std::thread::id();
    works.swap(coalesced_);
  }
  if (WorkRef batch = translated([&] { return launchBatch(); })) works.push_back(std::move(batch));
  if (works.size() == 1) return works[0];
  Tensors outputs;
  for (const auto& work : works) {
    for (auto& tensor : work->result()) outputs.push_back(std::move(tensor));
  }
  return c10::make_intrusive<CombinedWork>(rank_, std::move(works), std::move(outputs),
                                           options_->timeout);
}

}  // namespace fastcoll
