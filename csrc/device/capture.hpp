// Streams that are being captured into a CUDA graph, asked of the driver by name: neither torch's
// device-generic classes nor its oldest supported release say it, and this library is built without
// CUDA. Where no driver is loaded, as with a device of a test, nothing is ever captured.
#pragma once

#include <c10/core/Stream.h>

namespace fastcoll {

/// Whether what is put on the stream goes into a graph, instead of running.
bool isCaptured(const c10::Stream& stream) noexcept;

/// For a thread that asks events while other threads may capture: without this, any such call ends
/// every capture of the process with an error ("global" is torch's default mode of capture).
void leaveCapturesAlone() noexcept;

}  // namespace fastcoll
