// The one-way channel from a sender to a receiver, in the sender's arena. It exists once the sender
// has something for that receiver, and its offset stands in the sender's link to it.
//
// The sender posts a descriptor per message, in order. Messages of up to kInlineBytes ride in the
// descriptor. Larger ones stay with the sender until the receiver, having matched one to a receive,
// grants it; then the sender streams it through the data slots. So a message that nobody receives
// yet never blocks those behind it, and tags may be matched in any order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../base/dtype.hpp"

namespace fastcoll {

struct PairChannel {
  static constexpr std::size_t kDescriptors = 16;
  static constexpr std::size_t kInlineBytes = 2048;
  static constexpr std::size_t kDataSlots = 4;
  static constexpr std::size_t kDataBytes = 64 * 1024;

  struct Descriptor {
    std::uint64_t bytes;
    std::int32_t tag;
    DType dtype;
    alignas(16) std::uint8_t payload[kInlineBytes];
  };

  // Written by the sender. Counts only grow; release on write, acquire on read.
  alignas(64) std::atomic<std::uint64_t> posted;  // descriptors that may be read
  std::atomic<std::uint64_t> streamed;            // data slots that may be read
  // Written by the receiver.
  alignas(64) std::atomic<std::uint64_t> taken;  // descriptors whose place may be reused
  std::atomic<std::uint64_t> granted;            // 1 + number of the message wanted now
  std::atomic<std::uint64_t> drained;            // data slots that may be reused

  alignas(64) Descriptor descriptors[kDescriptors];
  alignas(64) std::uint8_t data[kDataSlots][kDataBytes];
};

}  // namespace fastcoll
