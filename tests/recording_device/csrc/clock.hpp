// Vector clocks over the streams of all devices.
//
// Work on a stream is numbered 1, 2, 3, … A clock holds for every stream the number up to which its
// work is known to come before. Host threads have clocks too, but no numbers: they touch no device
// memory, and their clocks only advance when they wait for streams.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace recording {

constexpr int kDevices = 2;
constexpr int kPoolSize = 32;  // of each priority, as in torch's CUDA streams
constexpr int kStreamsPerDevice = 1 + 2 * kPoolSize;
constexpr int kStreams = kDevices * kStreamsPerDevice;

// Index of a stream among the streams of all devices. The order within a device is: default stream,
// pool of normal priority, pool of high priority.
using StreamIndex = int;

constexpr StreamIndex streamIndex(int device, int64_t id) {
  return device * kStreamsPerDevice + static_cast<int>(id);
}
constexpr int deviceOf(StreamIndex stream) {
  return stream / kStreamsPerDevice;
}
constexpr int64_t idOf(StreamIndex stream) {
  return stream % kStreamsPerDevice;
}

// "recording:0 default", "recording:1 normal 3", "recording:0 high 0".
inline std::string nameOf(StreamIndex stream) {
  if (stream < 0) return "no known stream";
  const auto id = static_cast<int>(idOf(stream));
  const std::string device = "recording:" + std::to_string(deviceOf(stream));
  if (id == 0) return device + " default";
  const std::string pool = id <= kPoolSize ? " normal " : " high ";
  return device + pool + std::to_string((id - 1) % kPoolSize);
}

class Clock {
 public:
  uint64_t operator[](StreamIndex stream) const { return times_[static_cast<size_t>(stream)]; }

  void merge(const Clock& other) {
    for (size_t i = 0; i < times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
  }

  uint64_t advance(StreamIndex stream) { return ++times_[static_cast<size_t>(stream)]; }

 private:
  std::array<uint64_t, kStreams> times_{};
};

}  // namespace recording
