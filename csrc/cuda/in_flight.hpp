// One or several calls as one operation on a stream, whose end was not seen yet: its description,
// its deadline, the event after it, and the calls whose tensors it uses.
#pragma once

#include <c10/core/Event.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/dtype.hpp"
#include "calls/call.hpp"
#include "trace/trace.hpp"

namespace fastcoll {

class InFlightCall {
 public:
  /// `calls`: of one device. Takes over the extensions of their timeouts.
  explicit InFlightCall(const std::vector<CallRef>& calls);

  std::uint64_t seq = 0;
  std::atomic<std::uint64_t> number{0};  // see UnderWay
  const char* const call;  // "all_reduce"
  const DType dtype;
  std::int64_t inElements = 0;
  std::int64_t outElements = 0;
  const Milliseconds timeout;
  TimePoint launched;
  TimePoint deadline;
  const c10::Device device;
  /// The stream on which it runs, once that is known.
  std::optional<c10::Stream> stream;
  /// When this stream waits for the end, the kept tensors are freed; nullopt if the calls came from
  /// several streams.
  std::optional<c10::Stream> callers;
  std::vector<trace::RecordId> traces;  // of its calls

  /// "all_reduce(seq 7, float32[1024])"
  std::string describe() const;

  /// Keeps the calls, with their tensors, until the callers' stream waits for the end, or the end
  /// was seen. The memory belongs to other streams, which would reuse it at once.
  void stash(std::vector<CallRef> calls) {
    std::lock_guard<std::mutex> lock(mutex_);
    stash_ = std::move(calls);
  }
  std::vector<CallRef> unstash() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(stash_, {});
  }
  bool hasStash() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return !stash_.empty();
  }
  /// Queries the device, even if another thread has seen the end, and releases the tensors if the
  /// end has passed. A thread's order of frees is its own, so the thread that frees must query.
  bool unstashIfEnded();

  void traceStart() const;
  void traceEnd(const std::exception_ptr& fault, bool groupFailed) const noexcept;

  /// The call is on its stream between these events. `begin` is nullptr unless calls are timed.
  /// `captured`: the stream is being captured into a graph, so no event may be queried, and nothing
  /// has begun.
  void issued(std::shared_ptr<c10::Event> begin, std::shared_ptr<c10::Event> end, bool captured);
  bool captured() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return captured_;
  }
  /// Makes a stream wait for the end.
  void blockOn(const c10::Stream& stream) const;
  /// The call's time on the device. Throws Error(Value) unless it was timed and has ended.
  float milliseconds() const;

  /// True when the device has passed the end, or the call has failed.
  bool ended() const;
  /// Calls `callback` when the watchdog sees the end, or at once if the end was seen.
  void whenEnded(std::function<void()> callback);
  /// Marks the end as seen. Returns the callbacks to run now, on a thread that may wait for the
  /// GIL.
  std::vector<std::function<void()>> seen();
  /// From here on the call can only fail: the group has a fault whose text comes later. A call that
  /// an abort lets pass has not succeeded.
  void markFailing();
  bool failing() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return failing_;
  }
  /// Ends the call with an error; the first one counts. fault() sets `reported`.
  void fail(std::exception_ptr fault, std::shared_ptr<std::atomic<bool>> reported);
  std::exception_ptr fault() const {
    std::lock_guard<std::mutex> lock(mutex_);
    if (reported_ != nullptr) reported_->store(true, std::memory_order_relaxed);
    return fault_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<CallRef> stash_;
  std::shared_ptr<c10::Event> begin_;
  std::shared_ptr<c10::Event> end_;  // nullptr while the call is being issued
  bool captured_ = false;
  bool failing_ = false;
  bool seen_ = false;
  std::vector<std::function<void()>> callbacks_;
  std::exception_ptr fault_;
  std::shared_ptr<std::atomic<bool>> reported_;
  mutable std::atomic<bool> passed_{false};
};

using InFlightRef = std::shared_ptr<InFlightCall>;

}  // namespace fastcoll
