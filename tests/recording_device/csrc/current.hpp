// The current device of the calling thread, its current stream on each device, and the two names of
// a stream: c10's, and the native handle that libraries get.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "clock.hpp"

namespace recording {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

int currentDevice();
// Returns the device that was current.
int setCurrentDevice(int device);

StreamIndex currentStream(int device);
StreamIndex currentStream();
StreamIndex exchangeCurrentStream(StreamIndex stream);
// The next one of the pool, in turn.
StreamIndex poolStream(int device, bool high_priority);

c10::Stream toStream(StreamIndex stream);
StreamIndex indexOf(const c10::Stream& stream);

void* handleOf(StreamIndex stream);
// -1 for what is no handle.
StreamIndex fromHandle(const void* handle);

}  // namespace recording
