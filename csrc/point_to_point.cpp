// Send, receive and coalescing of ProcessGroupFastcoll.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include "base/interrupt.hpp"
#include "engine/worker_pool.hpp"
#include "gloo_messages.hpp"
#include "process_group.hpp"

namespace fastcoll {
namespace {

/// One message over shared memory, which tells its work when it is done.
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

/// One message over Gloo. A pooled thread waits for it, because Gloo's works do not end by
/// themselves.
class RemoteMessageWork : public WorkFastcoll {
 public:
  using WorkFastcoll::WorkFastcoll;
  int sourceRank() const override { return inner->sourceRank(); }
  c10::intrusive_ptr<c10d::Work> inner;

 protected:
  bool waitForTransfer(std::optional<TimePoint> until) override {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!completed_) {
      auto next = Clock::now() + kWaitSlice;
      if (until && *until < next) next = *until;
      cv_.wait_until(lock, next, [this] { return completed_; });
      if (!completed_ && until && Clock::now() >= *until) return false;
      lock.unlock();
      checkInterrupt();
      lock.lock();
    }
    return true;
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
    throw Error(ErrorKind::Value, site.prefix() + "a group of one rank has nobody to talk to");
  }
  const bool profiled = at::hasCallbacks();
  if (profiled) {
    recordParameters({typeOf(send, peer), titleOf(send, peer), true, timeout,
                      send ? Tensors{tensor} : Tensors{}, send ? Tensors{} : Tensors{tensor}},
                     site.name, messages_ + 1, true);
  }
  const trace::RecordId record = tracedMessage(site.name, tensor, send, peer, tag);
  try {
    if (!engine_->pointToPointShared(timeout, site.name, messages_ + 1)) {
      return launchRemote(site, tensor, send, peer, tag, record);
    }
    return launchShared(site, tensor, send, peer, tag, record);
  } catch (...) {
    trace::fail(record, std::current_exception(), engine_->faulted());
    throw;
  }
}

WorkRef ProcessGroupFastcoll::launchShared(const CallSite& site, at::Tensor& tensor, bool send,
                                           int peer, int tag, trace::RecordId record) {
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
  op->timeout = options_->timeout;
  op->deadline = deadlineAfter(Clock::now(), op->timeout);
  // A title makes torch set up its profiler's record, which takes longer than a small message.
  auto work = c10::make_intrusive<PointToPointWork>(
      rank_, typeOf(send, peer), profiled ? titleOf(send, peer) : nullptr,
      profiled ? std::optional<Tensors>(Tensors{tensor}) : std::nullopt,
      send ? Tensors{} : Tensors{tensor}, op->seq);
  op->work = work;
  work->attach(engine_, op);
  op->task->prepare();
  engine_->pointToPoint().submit(op);
  return work;
}

WorkRef ProcessGroupFastcoll::launchRemote(const CallSite& site, at::Tensor& tensor, bool send,
                                           int peer, int tag, trace::RecordId record) {
  auto& remote = dynamic_cast<GlooMessages&>(engine_->remote(options_->timeout));
  requireDense(site, tensor);
  if (!send) requireNoOverlap(site, tensor);
  // As bytes: Gloo does not know every dtype.
  at::Tensor flat = at::empty({tensor.numel()}, tensor.options().requires_grad(false));
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    if (send) flat.copy_(tensor.reshape({-1}));
  }
  const auto bytes = static_cast<int64_t>(tensor.numel() * tensor.element_size());
  Tensors raw{at::from_blob(flat.data_ptr(), {bytes}, [flat](void*) {}, at::kByte)};
  auto work = c10::make_intrusive<RemoteMessageWork>(
      rank_, typeOf(send, peer), titleOf(send, peer), std::optional<Tensors>(Tensors{tensor}),
      send ? Tensors{} : Tensors{tensor}, ++messages_);
  auto& gloo = *remote.backend();
  work->inner = send                 ? gloo.send(raw, peer, tag)
                : peer == kAnySource ? gloo.recvAnysource(raw, tag)
                                     : gloo.recv(raw, peer, tag);
  const std::string what = concat(
      send ? "send" : "recv", "(seq ", messages_, ", ", dtypeName(dtypeOf(tensor.scalar_type())),
      "[", tensor.numel(), "], ", send ? "to " : "from ",
      peer == kAnySource ? "any rank" : concat("rank ", peer), ", tag ", tag, ")");
  const std::string prefix = site.prefix();
  trace::start(record);
  auto numbers = peer == kAnySource && record != 0 ? messageNumbers_ : nullptr;
  runOnWorker(
      [engine = engine_, work, flat, tensor, send, prefix, what, record, numbers, tag]() mutable {
        std::exception_ptr fault;
        try {
          work->inner->wait();
          if (!send) {
            at::AutoDispatchBelowADInplaceOrView guard;
            tensor.copy_(flat.reshape(tensor.sizes()));
          }
        } catch (const std::exception& error) {
          const std::string text = error.what();
          const bool late = text.find("imed out") != std::string::npos;
          ToldFault told{ErrorKind::Timeout,
                         concat(late ? "Timed out in " : "the connection failed in ", what,
                                " over Gloo: ", text.substr(0, text.find('\n')))};
          if (!late) told = engine->whoBroke(told.text);
          fault = std::make_exception_ptr(Error(told.kind, prefix + told.text));
        }
        tensor.reset();
        if (fault) {
          trace::fail(record, fault);
        } else {
          const int source = numbers == nullptr ? -1 : work->sourceRank();
          if (source >= 0) {
            trace::setMessage(record, source, numbers->next(false, source, tag, false));
          }
          trace::complete(record);
        }
        work->markDone(fault);
      });
  return work;
}

WorkRef ProcessGroupFastcoll::send(Tensors& tensors, int destination, int tag) {
  return guarded([&]() -> WorkRef {
    const CallSite site = this->site("send");
    if (tensors.size() != 1) throw Error(ErrorKind::Value, site.prefix() + "expected one tensor");
    WorkRef work = launchPointToPoint(site, tensors[0], true, destination, tag);
    collecting(work);
    return work;
  });
}

WorkRef ProcessGroupFastcoll::recv(Tensors& tensors, int source, int tag) {
  return guarded([&]() -> WorkRef {
    const CallSite site = this->site("recv");
    if (tensors.size() != 1) throw Error(ErrorKind::Value, site.prefix() + "expected one tensor");
    checkRank(site, "source rank", source);  // any rank is asked for by another call
    WorkRef work = launchPointToPoint(site, tensors[0], false, source, tag);
    collecting(work);
    return work;
  });
}

WorkRef ProcessGroupFastcoll::recvAnysource(Tensors& tensors, int tag) {
  return guarded([&]() -> WorkRef {
    const CallSite site = this->site("recv");
    if (tensors.size() != 1) throw Error(ErrorKind::Value, site.prefix() + "expected one tensor");
    WorkRef work = launchPointToPoint(site, tensors[0], false, kAnySource, tag);
    collecting(work);
    return work;
  });
}

/// On CPU a batch gains nothing from being one work, and Python's way of collecting it costs more
/// than a small exchange does; calls that are collected all the same work.
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
  return c10::make_intrusive<CombinedWork>(rank_, std::move(works), std::move(outputs));
}

}  // namespace fastcoll
