// Send, receive and coalescing of ProcessGroupFastcoll.
#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include "base/entry_lock.hpp"
#include "calls/checks.hpp"
#include "calls/message.hpp"
#include "process_group.hpp"

namespace fastcoll {

// --- doors ---------------------------------------------------------------------------------------

CallRef Doors::message(const CallType& type, Tensors& tensors, int peer, int tag) const {
  const CallSite site = at(type);
  const at::Tensor& tensor = single(site, tensors);
  const bool send = type.collective == Collective::Send;
  const bool anySource = &type == &calls::RecvAny;
  if (!anySource) {
    checkRank(site, send ? "destination rank" : "source rank", peer);
    if (peer == rank_) refuse(site, "another rank", "this one. Copy the tensor instead.");
  }
  if (tensor.defined() && isServed(tensor.device().type())) {
    if (anySource) {
      refuse(site, concat("a source rank for a tensor on ", tensor.device()),
             "none: receives from any rank are for CPU tensors only.");
    }
    auto call = std::make_shared<Call>(site, tensor);
    call->request.root = peer;
    send ? call->addInput(tensor) : call->addOutput(tensor);
    call->async = true;
    call->timeout = c10d::kUnsetTimeout;
    if (send) call->inputs = {tensor};
    call->outputs = {tensor};
    return call;
  }
  if (size_ == 1) {
    refuse(site, "a group of at least 2 ranks", "1. Copy the tensor instead.");
  }
  return std::make_shared<MessageCall>(site, tensor, peer, tag);
}

// --- a message -----------------------------------------------------------------------------------

MessageCall::MessageCall(const CallSite& of, const at::Tensor& moved, int to, int tagged)
    : Call(of), tensor(moved) {
  send = sends();
  add(tensor, send ? &message : nullptr, send ? nullptr : &message);
  peer = to;
  tag = tagged;
  dtype = dtypeOf(tensor.scalar_type());
}

void MessageCall::complete(std::exception_ptr fault) noexcept {
  if (work != nullptr) beforeWait();  // the callbacks of its future may wait
  if (!fault) {
    try {
      finish();
    } catch (...) {
      fault = std::current_exception();
    }
  }
  if (!repeats) {
    tensor.reset();
    forget();
  }
  if (numbers != nullptr && source >= 0) {
    trace::setMessage(trace, source, numbers->next(false, source, tag, false));
  }
  fault ? trace::fail(trace, fault) : trace::complete(trace);
  if (const auto ended = std::exchange(work, nullptr)) return ended->markDone(fault);
  unreported = std::move(fault);
}

WorkRef ProcessGroupFastcoll::startMessage(const std::shared_ptr<MessageCall>& call) {
  const bool profiled = at::hasCallbacks();
  if (profiled) {
    beforeWait();
    const Tensors moved{call->tensor};
    recordParameters(*call, call->send ? moved : Tensors{}, call->send ? Tensors{} : moved,
                     call->site.name, messages_ + 1);
  }
  WorkTerms terms = termsOf(options_->timeout);
  return numbered(*call, terms, [&]() -> WorkRef {
    const CallType& type = *call->site.type;
    // A title makes torch set up its profiler's record, which takes longer than a small message.
    auto work = c10::make_intrusive<PointToPointWork>(
        rank_, type.type, profiled ? type.title : nullptr,
        profiled ? std::optional<Tensors>(Tensors{call->tensor}) : std::nullopt,
        call->send ? Tensors{} : Tensors{call->tensor}, call->seq, std::move(terms));
    call->work = work;
    work->attach(engine_, call);
    try {
      post(call);
    } catch (...) {
      call->work.reset();  // call and work hold each other until completion
      throw;
    }
    return work;
  });
}

/// Numbers the message, records it in the trace, and calls `body`, which posts it.
template <typename Body>
auto ProcessGroupFastcoll::numbered(MessageCall& call, const WorkTerms& terms, Body body)
    -> decltype(body()) {
  call.seq = ++messages_;
  call.timeout = terms.timeout;
  call.deadline = deadlineAfter(Clock::now(), call.timeout);
  call.trace = trace_->message(call.draft);
  if (call.peer == kAnySource && call.trace != 0) call.numbers = trace_->messageNumbers();
  try {
    return body();
  } catch (...) {
    trace::fail(call.trace, std::current_exception(), engine_->faulted());
    throw;
  }
}

void ProcessGroupFastcoll::post(const std::shared_ptr<MessageCall>& call) {
  if (call->message.bytes() > kBriefBytes || engine_->isRemote()) beforeWait();
  PointToPoint& pointToPoint = engine_->pointToPoint(call->site.name, call->seq);
  call->prepare();
  pointToPoint.submit(call);
}

void ProcessGroupFastcoll::postAwaited(const std::shared_ptr<MessageCall>& call,
                                       const WorkTerms& terms) {
  call->awaited = true;
  numbered(*call, terms, [&] { post(call); });
}

void ProcessGroupFastcoll::await(const std::shared_ptr<MessageCall>& call) {
  engine_->pointToPoint().wait(call, TimePoint::max());
  if (call->unreported) std::rethrow_exception(call->unreported);
}

/// A message that the caller waits for, or a send and the receive beside it.
WorkRef ProcessGroupFastcoll::runMessages(const Calls& all) {
  const auto onCpu = [](const CallRef& call) {
    return std::dynamic_pointer_cast<MessageCall>(call);
  };
  const auto first = onCpu(all.call);
  if (all.receive != nullptr && first == nullptr && onCpu(all.receive) == nullptr) {
    beforeWait();
    startCoalescing();  // on one stream the sends of both ranks would wait for the receives
    start(all.call);
    start(all.receive);
    return endCoalescing();
  }
  const bool needsWork = at::hasCallbacks() || collects();
  std::optional<WorkTerms> terms;  // held until the messages are done
  const auto postNow = [&](const std::shared_ptr<MessageCall>& call) {
    describe(*call);
    if (!terms) terms = termsOf(options_->timeout);
    postAwaited(call, *terms);
  };
  WorkRef work;
  if (needsWork || first == nullptr) {
    work = start(all.call);
  } else {
    postNow(first);
  }
  if (all.receive != nullptr) {
    const auto second = onCpu(all.receive);
    if (needsWork || second == nullptr) {
      if (const WorkRef receiving = start(all.receive)) receiving->wait();
    } else {
      postNow(second);
      await(second);
    }
  }
  if (!needsWork && first != nullptr) await(first);
  return work;
}

/// A receive comes after the send beside it, and is waited for first.
void ProcessGroupFastcoll::repeatMessages(const Plan& plan) {
  const WorkTerms terms = termsOf(options_->timeout);
  const CallRef calls[] = {plan.calls.call, plan.calls.receive};
  for (const CallRef& call : calls) {
    if (call == nullptr) continue;
    const auto message = std::static_pointer_cast<MessageCall>(call);
    message->reset();
    postAwaited(message, terms);
  }
  if (calls[1] != nullptr) await(std::static_pointer_cast<MessageCall>(calls[1]));
  await(std::static_pointer_cast<MessageCall>(calls[0]));
}

// --- batches -------------------------------------------------------------------------------------

/// On CPU a batch gains nothing from being one work, and collecting it in Python takes longer than
/// a small exchange. Collected calls still work.
bool ProcessGroupFastcoll::supportsCoalescing() const {
  return at::hasCUDA();
}

void ProcessGroupFastcoll::stopCollecting() {
  if (!batch_.collects()) return;
  for (const CallRef& call : batch_.end().onDevice) {
    trace::fail(call->trace, "the batch was discarded", false);
  }
}

WorkRef ProcessGroupFastcoll::endCoalescing() {
  auto [works, onDevice] = batch_.end();
  if (!onDevice.empty()) {
    works.push_back(translated([&] { return launchBatch(std::move(onDevice)); }));
  }
  if (works.size() == 1) return works[0];
  Tensors outputs;
  for (const auto& work : works) {
    for (auto& tensor : work->result()) outputs.push_back(std::move(tensor));
  }
  return c10::make_intrusive<CombinedWork>(rank_, std::move(works), std::move(outputs),
                                           options_->timeout);
}

}  // namespace fastcoll
