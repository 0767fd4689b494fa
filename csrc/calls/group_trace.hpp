// A group in the trace, and the records of its calls. Each call has the name, sizes and dtypes that
// torch's analyser expects of a correct one (base/collectives.def).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "base/settings.hpp"
#include "calls/call.hpp"
#include "calls/message_numbers.hpp"
#include "torch/options.hpp"

namespace fastcoll {

class GroupTrace {
 public:
  /// `group` must outlive this. `faulted` is called on any thread.
  GroupTrace(const c10d::Backend& group, std::string name, c10::intrusive_ptr<Options> options,
             const Settings& settings, std::function<bool()> faulted);
  ~GroupTrace();

  /// Fills in a call's record.
  void describe(Call& call, std::chrono::milliseconds timeout);
  /// Numbers a described message and records it.
  trace::RecordId message(trace::Record& draft);
  /// The same for any described call on a device.
  trace::RecordId onDevice(trace::Record& draft);
  trace::RecordId monitoredBarrier(std::chrono::milliseconds timeout);
  /// Whether no device call was refused before, by a group that has failed.
  bool isFirstRefusal() { return !refused_.exchange(true); }
  const std::shared_ptr<MessageNumbers>& messageNumbers() const { return messageNumbers_; }

 private:
  std::uint32_t number();
  static void poll();

  const c10d::Backend& group_;
  const std::string name_;
  const c10::intrusive_ptr<Options> options_;
  const std::function<bool()> faulted_;
  std::mutex mutex_;
  std::atomic<std::uint32_t> number_{0};  // 0: no call yet
  std::atomic<std::uint64_t> deviceCalls_{0};
  std::atomic<std::uint64_t> monitored_{0};
  std::atomic<bool> refused_{false};
  const std::shared_ptr<MessageNumbers> messageNumbers_ = std::make_shared<MessageNumbers>();
};

}  // namespace fastcoll
