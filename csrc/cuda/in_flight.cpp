#include "cuda/in_flight.hpp"

#include "base/error.hpp"
#include "cuda/capture.hpp"

namespace fastcoll {

InFlightCall::InFlightCall(c10::DeviceType type, bool timed)
    : timed(timed),
      begin_(type, c10::EventFlag::BACKEND_DEFAULT),
      end_(type, timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT) {}

const char* InFlightCall::nameOf(const std::vector<CallRef>& calls) {
  return calls.size() == 1 ? collectiveName(calls[0]->request.collective) : "batch";
}

void InFlightCall::begin(const DeviceLaunch& launch, const c10::Stream& on) {
  const Call& first = *launch.calls[0];
  issued_ = captured_ = failing_ = seen_ = false;
  number = 0;
  passed_.store(false, std::memory_order_relaxed);
  fault_ = nullptr;
  reported_ = nullptr;
  seq = 0;
  call = nameOf(launch.calls);
  dtype = first.request.dtype;
  inElements = outElements = 0;
  for (const DeviceRequest& request : launch.requests) {
    inElements += request.in.count;
    outElements += request.out.count;
  }
  timeout = first.terms.timeout;
  stream = on;
  callers = first.callers;
  traces.clear();
  for (const CallRef& one : launch.calls) {
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

void InFlightCall::traceEnd() const noexcept {
  for (const auto id : traces) trace::complete(id);
}

void InFlightCall::issuing() {
  if (timed) begin_.record(*stream);
}

void InFlightCall::issued(bool captured) {
  end_.record(*stream);
  std::lock_guard<std::mutex> lock(mutex_);
  issued_ = true;
  captured_ = captured;
}

void InFlightCall::blockOn(const c10::Stream& waiting) const {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!issued_) return;
  }
  end_.block(waiting);
}

bool InFlightCall::unstashIfEnded() {
  bool queries = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // A captured event may not be queried, and its call has not begun.
    queries = issued_ && !captured_;
  }
  const RelaxedCapture relaxed;
  if (queries && !end_.query()) return false;
  unstash();
  return true;
}

float InFlightCall::milliseconds() const {
  if (!timed || !ended()) {
    throw Error(ErrorKind::Value,
                concat("fastcoll: ", describe(),
                       timed ? " is still running. Call wait() first."
                             : " was not timed. Switch timing on before the call: "
                               "group._enable_collectives_timing()."));
  }
  const RelaxedCapture relaxed;
  return static_cast<float>(begin_.elapsedTime(end_));
}

bool InFlightCall::ended() const {
  if (passed()) return true;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (fault_ != nullptr) return true;
    if (failing_ || !issued_ || captured_) return false;
  }
  const RelaxedCapture relaxed;
  return end_.query() && pass();
}

bool InFlightCall::pass() const {
  // An abort after the query may have let the event pass.
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
