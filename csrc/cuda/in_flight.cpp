#include "cuda/in_flight.hpp"

#include "base/error.hpp"
#include "cuda/capture.hpp"

namespace fastcoll {

InFlightCall::InFlightCall(const std::vector<CallRef>& calls)
    : call(calls.size() == 1 ? collectiveName(calls[0]->request.collective) : "batch"),
      dtype(calls[0]->request.dtype),
      timeout(calls[0]->terms.timeout),
      device(calls[0]->callers->device()),
      callers(calls[0]->callers) {
  for (const CallRef& one : calls) {
    if (one->callers != callers) callers = std::nullopt;
    if (one->trace != 0) traces.push_back(one->trace);
    if (auto extension = std::move(one->terms.extension)) {
      whenEnded([held = std::move(extension)]() mutable { held.reset(); });
    }
  }
}

std::string InFlightCall::describe() const {
  std::string text = concat(call, "(seq ", seq);
  if (inElements > 0 || outElements > 0) {
    text += concat(", ", dtypeName(dtype), "[", inElements, "]");
    if (outElements != inElements) text += concat(" -> [", outElements, "]");
  }
  return text + ")";
}

void InFlightCall::traceStart() const {
  for (const auto id : traces) trace::start(id);
}

void InFlightCall::traceEnd(const std::exception_ptr& fault, bool groupFailed) const noexcept {
  for (const auto id : traces) fault ? trace::fail(id, fault, groupFailed) : trace::complete(id);
}

void InFlightCall::issued(std::shared_ptr<c10::Event> begin, std::shared_ptr<c10::Event> end,
                          bool captured) {
  std::lock_guard<std::mutex> lock(mutex_);
  begin_ = std::move(begin);
  end_ = std::move(end);
  captured_ = captured;
}

void InFlightCall::blockOn(const c10::Stream& stream) const {
  std::shared_ptr<c10::Event> end;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    end = end_;
  }
  if (end != nullptr) end->block(stream);
}

bool InFlightCall::unstashIfEnded() {
  std::shared_ptr<c10::Event> end;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!captured_) end = end_;  // a captured event may not be queried, and its call has not begun
  }
  const RelaxedCapture relaxed;
  if (end != nullptr && !end->query()) return false;
  unstash();
  return true;
}

float InFlightCall::milliseconds() const {
  std::shared_ptr<c10::Event> begin;
  std::shared_ptr<c10::Event> end;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    begin = begin_;
    end = end_;
  }
  if (begin == nullptr || !ended()) {
    throw Error(ErrorKind::Value,
                concat("fastcoll: ", describe(),
                       begin == nullptr ? " was not timed. Switch timing on before the call: "
                                          "group._enable_collectives_timing()."
                                        : " is still running. Call wait() first."));
  }
  const RelaxedCapture relaxed;
  return static_cast<float>(begin->elapsedTime(*end));
}

bool InFlightCall::ended() const {
  if (passed_.load(std::memory_order_acquire)) return true;
  std::shared_ptr<c10::Event> end;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (fault_ != nullptr) return true;
    if (failing_ || end_ == nullptr || captured_) return false;
    end = end_;
  }
  const RelaxedCapture relaxed;
  if (!end->query()) return false;
  // An abort after the check above may have let the event pass.
  std::lock_guard<std::mutex> lock(mutex_);
  if (failing_) return fault_ != nullptr;
  passed_.store(true, std::memory_order_release);
  return true;
}

void InFlightCall::whenEnded(std::function<void()> callback) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!seen_) return callbacks_.push_back(std::move(callback));
  }
  callback();
}

std::vector<std::function<void()>> InFlightCall::seen() {
  std::lock_guard<std::mutex> lock(mutex_);
  seen_ = true;
  return std::exchange(callbacks_, {});
}

void InFlightCall::markFailing() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!passed_.load(std::memory_order_relaxed)) failing_ = true;
}

void InFlightCall::fail(std::exception_ptr fault, std::shared_ptr<std::atomic<bool>> reported) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (fault_ != nullptr) return;
  fault_ = std::move(fault);
  reported_ = std::move(reported);
}

}  // namespace fastcoll
