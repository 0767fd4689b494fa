// Send, receive and coalescing of ProcessGroupFastcoll.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include "base/entry_lock.hpp"
#include "calls/checks.hpp"
#include "calls/prepared.hpp"

namespace fastcoll {
namespace {

std::shared_ptr<TensorMessage> makeMessage(const CallSite& site, const at::Tensor& tensor, int peer,
                                           int tag) {
  const bool send = site.type->collective == Collective::Send;
  auto op = std::make_shared<TensorMessage>();
  op->task.emplace(site);
  op->task->add(tensor, send ? &op->message : nullptr, send ? nullptr : &op->message);
  op->send = send;
  op->peer = peer;
  op->tag = tag;
  op->dtype = dtypeOf(tensor.scalar_type());
  return op;
}

/// Throws unless the peer is another rank of the group.
void checkPeer(const CallSite& site, int peer) {
  const bool send = site.type->collective == Collective::Send;
  checkRank(site, send ? "destination rank" : "source rank", peer);
  if (peer == site.rank) refuse(site, "another rank", "this one. Copy the tensor instead.");
}

}  // namespace

void TensorMessage::complete(std::exception_ptr fault) noexcept {
  if (work != nullptr) beforeWait();  // the callbacks of its future may wait
  if (!fault && task) {
    try {
      task->finish();
    } catch (...) {
      fault = std::current_exception();
    }
  }
  if (!repeats) task.reset();
  if (trace != 0) tellTrace(fault);
  if (const auto ended = std::exchange(work, nullptr)) return ended->markDone(fault);
  unreported = std::move(fault);
}

void TensorMessage::tellTrace(const std::exception_ptr& fault) noexcept {
  if (numbers != nullptr && source >= 0) {
    trace::setMessage(trace, source, numbers->next(false, source, tag, false));
  }
  fault ? trace::fail(trace, fault) : trace::complete(trace);
}

/// A message of a blocking call, which needs no work.
struct ProcessGroupFastcoll::AwaitedMessage {
  std::shared_ptr<TensorMessage> op;
  WorkTerms terms;
};

WorkRef ProcessGroupFastcoll::launchPointToPoint(const CallSite& site, at::Tensor& tensor, int peer,
                                                 int tag, AwaitedMessage* awaited) {
  const bool send = site.type->collective == Collective::Send;
  const bool anySource = site.type == &calls::RecvAny;
  if (!anySource) checkPeer(site, peer);
  const auto call = [&](Tensors outputs) -> Call {
    return {true, options_->timeout, send ? Tensors{tensor} : Tensors{}, std::move(outputs)};
  };
  if (tensor.defined() && isServed(tensor.device().type())) {
    if (preparing_ != nullptr) return nullptr;
    if (anySource) {
      refuse(site, concat("a source rank for a tensor on ", tensor.device()),
             "none: receives from any rank are for CPU tensors only.");
    }
    auto task = std::make_shared<TensorTask>(site, tensor);
    task->request.root = peer;
    send ? task->addInput(tensor) : task->addOutput(tensor);
    return launchOnDevice(std::move(task), call({tensor}), peer);
  }
  if (size_ == 1) {
    refuse(site, "a group of at least 2 ranks", "1. Copy the tensor instead.");
  }
  if (preparing_ != nullptr) {
    auto op = makeMessage(site, tensor, peer, tag);
    op->repeats = op->awaited = true;
    preparing_->keep(tensor);
    Prepared::Message& message = preparing_->messages.emplace_back();
    describeMessage(message.draft, site.name, tensor, send, peer, tag);
    message.op = std::move(op);
    return nullptr;
  }
  if (at::hasCallbacks()) {
    beforeWait();
    recordParameters(call(send ? Tensors{} : Tensors{tensor}), site.name, messages_ + 1, true);
  }
  const trace::RecordId record = tracedMessage(site.name, tensor, send, peer, tag);
  try {
    auto op = makeMessage(site, tensor, peer, tag);
    op->seq = ++messages_;
    op->trace = record;
    if (anySource && record != 0) op->numbers = messageNumbers_;
    return launchMessage(std::move(op), tensor, awaited);
  } catch (...) {
    trace::fail(record, std::current_exception(), engine_->faulted());
    throw;
  }
}

WorkRef ProcessGroupFastcoll::launchMessage(std::shared_ptr<TensorMessage> op, at::Tensor& tensor,
                                            AwaitedMessage* awaited) {
  const CallType& type = *op->task->site.type;
  const bool profiled = at::hasCallbacks();
  WorkTerms terms = termsOf(options_->timeout);
  op->timeout = terms.timeout;
  op->deadline = deadlineAfter(Clock::now(), op->timeout);
  if (awaited != nullptr && !profiled && !collects()) {
    op->awaited = true;
    post(op);
    *awaited = {std::move(op), std::move(terms)};
    return nullptr;
  }
  // A title makes torch set up its profiler's record, which takes longer than a small message.
  auto work = c10::make_intrusive<PointToPointWork>(
      rank_, type.type, profiled ? type.title : nullptr,
      profiled ? std::optional<Tensors>(Tensors{tensor}) : std::nullopt,
      op->send ? Tensors{} : Tensors{tensor}, op->seq, std::move(terms));
  op->work = work;
  work->attach(engine_, op);
  try {
    post(op);
  } catch (...) {
    op->work.reset();  // operation and work hold each other until completion
    throw;
  }
  return work;
}

WorkRef ProcessGroupFastcoll::message(const CallType& type, Tensors& tensors, int peer, int tag,
                                      AwaitedMessage* awaited) {
  return guarded(type, [&](const CallSite& site) {
    WorkRef work = launchPointToPoint(site, single(site, tensors), peer, tag, awaited);
    collecting(work);
    return work;
  });
}

void ProcessGroupFastcoll::post(const std::shared_ptr<TensorMessage>& op) {
  if (op->message.bytes() > kBriefBytes || engine_->isRemote()) beforeWait();
  PointToPoint& pointToPoint = engine_->pointToPoint(op->task->site.name, op->seq);
  op->task->prepare();
  pointToPoint.submit(op);
}

void ProcessGroupFastcoll::await(const std::shared_ptr<TensorMessage>& op) {
  if (op == nullptr) return;
  translated([&] { return engine_->pointToPoint().wait(op, TimePoint::max()); });
  if (op->unreported) std::rethrow_exception(translatedFault(op->unreported));
}

void ProcessGroupFastcoll::runMessages(Prepared& prepared) {
  const WorkTerms terms = termsOf(options_->timeout);
  const TimePoint deadline = deadlineAfter(Clock::now(), terms.timeout);
  for (Prepared::Message& message : prepared.messages) {
    message.op->reset();
    message.op->seq = ++messages_;
    message.op->timeout = terms.timeout;
    message.op->deadline = deadline;
    message.op->trace = recordMessage(message.draft);
    try {
      translated([&] { post(message.op); });
    } catch (...) {
      trace::fail(message.op->trace, std::current_exception(), engine_->faulted());
      throw;
    }
  }
  // A receive comes after the send beside it, and is waited for first, as in sendrecv().
  for (std::size_t i = prepared.messages.size(); i-- > 0;) await(prepared.messages[i].op);
}

WorkRef ProcessGroupFastcoll::messageNow(const CallType& type, Tensors& tensors, int peer,
                                         int tag) {
  AwaitedMessage awaited;
  WorkRef work = message(type, tensors, peer, tag, &awaited);
  await(awaited.op);
  return work;
}

WorkRef ProcessGroupFastcoll::send(Tensors& tensors, int destination, int tag) {
  return message(calls::Send, tensors, destination, tag);
}

WorkRef ProcessGroupFastcoll::recv(Tensors& tensors, int source, int tag) {
  return message(calls::Recv, tensors, source, tag);
}

WorkRef ProcessGroupFastcoll::sendrecv(Tensors& sent, int target, Tensors& received, int source,
                                       int tag) {
  // The receive is checked first, because nothing takes a message back.
  guarded(calls::Recv, [&](const CallSite& site) -> WorkRef {
    checkPeer(site, source);
    requireDense(site, single(site, received));
    requireNoOverlap(site, received[0]);
    return nullptr;
  });
  const int onCpu = int{sent[0].is_cpu()} + int{received[0].is_cpu()};
  if (preparing_ != nullptr && onCpu < 2) return nullptr;
  if (onCpu == 0) {
    beforeWait();
    startCoalescing();  // on one stream the sends of both ranks would wait for the receives
    send(sent, target, tag);
    recv(received, source, tag);
    return endCoalescing();
  }
  AwaitedMessage sending;
  WorkRef work = message(calls::Send, sent, target, tag, &sending);
  if (const WorkRef receiving = messageNow(calls::Recv, received, source, tag)) receiving->wait();
  await(sending.op);
  return work;
}

WorkRef ProcessGroupFastcoll::recvAnysource(Tensors& tensors, int tag) {
  return message(calls::RecvAny, tensors, kAnySource, tag);
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
