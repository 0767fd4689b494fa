// The calling thread's current device, its current stream on each device, and the two identifiers
// of a stream: c10's stream, and the native handle for libraries.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "clock.hpp"

namespace recording {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

int currentDevice();
// Returns the previous device.
int setCurrentDevice(int device);

StreamIndex currentStream(int device);
StreamIndex currentStream();
StreamIndex exchangeCurrentStream(StreamIndex stream);
// The pool's next stream, in turn.
StreamIndex poolStream(int device, bool high_priority);

c10::Stream toStream(StreamIndex stream);
StreamIndex indexOf(const c10::Stream& stream);

void* handleOf(StreamIndex stream);
// -1 for an invalid handle.
StreamIndex fromHandle(const void* handle);

}  // namespace recording
