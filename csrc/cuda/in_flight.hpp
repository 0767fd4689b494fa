// One or several calls as one operation on a stream, whose end was not seen yet: its description,
// its deadline, the event after it, and the calls whose tensors it uses. It is used again for later
// calls (flight_pool.hpp), with its event, because making one costs as much as recording it several
// times.
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
  /// `timed`: it measures the call's time on the device; not if the call is captured.
  InFlightCall(c10::DeviceType type, bool timed);
  /// Makes it the record of other calls, which run on `stream`, while no other thread uses it.
  /// Takes over the extensions of their timeouts.
  void begin(const DeviceLaunch& launch, const c10::Stream& stream);
  /// "all_reduce"
  static const char* nameOf(const std::vector<CallRef>& calls);

  const bool timed;
  std::uint64_t seq = 0;
  std::atomic<std::uint64_t> number{0};  // see UnderWay
  const char* call = "";                 // nameOf() its calls
  DType dtype = DType::UInt8;
  std::int64_t inElements = 0;
  std::int64_t outElements = 0;
  Milliseconds timeout{};
  TimePoint launched;
  TimePoint deadline;
  std::optional<c10::Stream> stream;  // on which it runs
  c10::Device device() const { return stream->device(); }
  /// When this stream waits for the end, the kept tensors are freed; nullopt if the calls came from
  /// several streams.
  std::optional<c10::Stream> callers;
  std::vector<trace::RecordId> traces;  // of its calls
  std::shared_ptr<InFlightCall> next;   // in its pool

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
  void traceEnd() const noexcept;

  /// Called before and after the call is put on its stream. `captured`: the stream is being
  /// captured into a graph, so no event may be queried, and nothing has begun. The events belong to
  /// the graph then.
  void issuing();
  void issued(bool captured);
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
  /// The same for a call that runs before one that has ended on its stream: queries nothing.
  bool pass() const;
  bool passed() const { return passed_.load(std::memory_order_acquire); }
  /// Calls `callback` when the watchdog sees the end, or at once if the end was seen.
  void whenEnded(std::function<void()> callback);
  /// Marks the end as seen. Returns the callbacks to run now, on a thread that may wait for the
  /// GIL.
  std::vector<std::function<void()>> seen();
  bool wasSeen() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return seen_;
  }
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
  // Recorded before issued(), and only used after it.
  c10::Event begin_;  // if timed
  c10::Event end_;
  mutable std::mutex mutex_;
  std::vector<CallRef> stash_;
  bool issued_ = false;
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
