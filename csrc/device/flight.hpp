// A call that was put on a stream and whose end nobody has seen yet: what it was, when it must have
// ended, the event behind it, and the tensors whose memory it uses.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../base/clock.hpp"
#include "../base/collective.hpp"
#include "../base/dtype.hpp"

namespace fastcoll {

class Flight {
 public:
  std::uint64_t seq = 0;
  const char* call = "";  // "all_reduce"
  DType dtype = DType::UInt8;
  std::int64_t inElements = 0;
  std::int64_t outElements = 0;
  Milliseconds timeout{};
  TimePoint deadline;
  c10::Device device{c10::kCPU};
  std::shared_ptr<c10::Event> end;
  /// Put on a stream that was being captured: its events may not be asked, and nothing has begun.
  bool captured = false;

  /// "all_reduce(seq 7, float32[1024])"
  std::string describe() const;

  /// The tensors stay until somebody's stream waits for the end, or the end was seen: their memory
  /// belongs to other streams, which would reuse it at once.
  void keep(std::vector<at::Tensor> tensors) {
    std::lock_guard<std::mutex> lock(mutex_);
    kept_ = std::move(tensors);
  }
  std::vector<at::Tensor> letGo() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::move(kept_);
  }

  /// True when the device has passed the end, or the call has failed.
  bool ended() const;
  /// Ends the call with an error; the first one counts.
  void fail(std::exception_ptr fault);
  std::exception_ptr fault() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return fault_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<at::Tensor> kept_;
  std::exception_ptr fault_;
  mutable std::atomic<bool> passed_{false};
};

using FlightRef = std::shared_ptr<Flight>;

}  // namespace fastcoll
