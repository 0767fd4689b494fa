// A group in the trace, and the records of its calls. Each call has the name, sizes and dtypes that
// torch's analyser expects of a correct one (base/collectives.def).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "base/settings.hpp"
#include "calls/call.hpp"
#include "torch/options.hpp"

namespace fastcoll {

/// Numbers the messages from one rank to another with one tag. Both ranks count alike, so their two
/// traces show which send and which receive belong together.
class MessageNumbers {
 public:
  /// The number of the next message that is sent to, or received from, a rank; the first is 1.
  std::uint64_t next(bool send, int peer, int tag, bool device) {
    const std::uint64_t key = std::uint64_t{send} << 63 | std::uint64_t{device} << 62 |
                              static_cast<std::uint64_t>(peer) << 32 |
                              static_cast<std::uint32_t>(tag);
    const std::lock_guard<std::mutex> lock(mutex_);
    // Limit the memory of a program that gives every message a tag of its own: further tags have no
    // number, on both ends.
    if (counts_.size() >= kMost && counts_.find(key) == counts_.end()) return 0;
    return ++counts_[key];
  }

 private:
  static constexpr std::size_t kMost = 1 << 16;
  std::mutex mutex_;
  std::unordered_map<std::uint64_t, std::uint64_t> counts_;
};

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

  const c10d::Backend& group_;
  const std::string name_;
  const c10::intrusive_ptr<Options> options_;
  std::mutex mutex_;
  std::atomic<std::uint32_t> number_{0};  // 0: no call yet
  std::atomic<std::uint64_t> deviceCalls_{0};
  std::atomic<std::uint64_t> monitored_{0};
  std::atomic<bool> refused_{false};
  const std::shared_ptr<MessageNumbers> messageNumbers_ = std::make_shared<MessageNumbers>();
};

}  // namespace fastcoll
