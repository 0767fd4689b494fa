// For libraries that access the device's memory directly. They look these functions up by dlsym,
// and do without them if they are missing.
#include "current.hpp"
#include "recorder.hpp"

using recording::Recorder;

extern "C" {

// Reports one access, made by `what` on the stream with this native handle.
__attribute__((visibility("default"))) void recordingDeviceAccess(void* stream, const void* address,
                                                                  size_t bytes, int write,
                                                                  const char* what) {
  if (Recorder::get().isQuiet()) return;
  const auto index = recording::fromHandle(stream);
  if (index < 0) {
    Recorder::get().unknownStream(stream, what);
    return;
  }
  const auto begin = reinterpret_cast<uintptr_t>(address);
  Recorder::get().launch(index, what, {{recording::Footprint(begin, begin + bytes), write != 0}});
}

// The index of the device whose memory this is; -1 for other memory.
__attribute__((visibility("default"))) int recordingDeviceOf(const void* address) {
  return Recorder::get().deviceOf(address);
}

// Makes another allocator's memory device memory, as if it had been allocated on the stream.
__attribute__((visibility("default"))) void recordingDeviceAdopt(void* address, size_t bytes,
                                                                 void* stream) {
  const auto index = recording::fromHandle(stream);
  if (index >= 0) Recorder::get().allocate(address, bytes, index);
}

// Undoes recordingDeviceAdopt; work in progress there is not checked.
__attribute__((visibility("default"))) void recordingDeviceForget(const void* address) {
  Recorder::get().forget(address);
}

}  // extern "C"
