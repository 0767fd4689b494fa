// Streams that are being captured into a CUDA graph, asked of the driver by name: neither torch's
// device-generic classes nor its oldest supported release say it, and this library is built without
// CUDA. Where no driver is loaded, as with a device of a test, nothing is ever captured.
#pragma once

#include <c10/core/Stream.h>

namespace fastcoll {

/// Whether what is put on the stream goes into a graph, instead of running.
bool isCaptured(const c10::Stream& stream) noexcept;

/// While it lives, this thread may query events although other threads capture. Without it, such a
/// query fails and ends every capture of the process ("global" is torch's default mode of capture).
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
