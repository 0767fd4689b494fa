// Numbers the messages from one rank to another with one tag. Both ranks count alike, so their two
// traces show which send and which receive belong together.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace fastcoll {

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

}  // namespace fastcoll
