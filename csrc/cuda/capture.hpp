// Detects whether a stream is being captured into a CUDA graph. The driver's function is looked up
// by name: this library is built without CUDA, and neither torch's device-generic classes nor its
// oldest supported release report a capture. Without a loaded driver, as on a test device, no
// stream is captured.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace fastcoll {

/// Whether work put on the stream goes into a graph instead of running.
bool isCaptured(const c10::Stream& stream) noexcept;

/// A graph that a stream is being captured into; the id is unique in the process, and 0: none.
struct Capture {
  std::uint64_t id = 0;
  void* graph = nullptr;
};
Capture captureOf(const c10::Stream& captured) noexcept;

/// Sets `over` when the graph and its instances are destroyed, if the driver can.
void whenDestroyed(const Capture& capture, std::shared_ptr<std::atomic<bool>> over);

/// During its lifetime this thread may query events while other threads capture. Otherwise such a
/// query fails and ends every capture of the process, because torch's default capture mode is
/// "global".
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept;
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int (*const exchange_)(int* mode);  // nullptr without a driver
  int before_;
};

}  // namespace fastcoll
