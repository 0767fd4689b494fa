// Streams, events and devices for torch's device-generic code.
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <functional>
#include <utility>

#include "current.hpp"
#include "recorder.hpp"

namespace recording {
namespace {

thread_local int current_device = 0;
thread_local std::array<StreamIndex, kDevices> current_streams = [] {
  std::array<StreamIndex, kDevices> streams{};
  for (int d = 0; d < kDevices; ++d) streams[static_cast<size_t>(d)] = streamIndex(d, 0);
  return streams;
}();
std::array<std::array<std::atomic<unsigned>, 2>, kDevices> handed_out{};
// Only the addresses are used. They are not small numbers cast to pointers, because a wrong handle
// must not be mistaken for a right one.
std::array<char, kStreams> handles{};

void check(int device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "recording has ", kDevices,
              " devices, not one of index ", device);
}

// A driver's stand-in may refuse calls, as CUDA does while a stream is captured.
void requireUncaptured() {
  using Refuses = int (*)();
  const auto refuses = reinterpret_cast<Refuses>(dlsym(RTLD_DEFAULT, "recordingDeviceRefuses"));
  TORCH_CHECK(refuses == nullptr || refuses() == 0,
              "operation not permitted when stream is capturing");
}

int indexOr(const c10::Device& device) {
  if (!device.has_index()) return current_device;
  check(device.index());
  return device.index();
}

}  // namespace

int currentDevice() {
  return current_device;
}

int setCurrentDevice(int device) {
  check(device);
  return std::exchange(current_device, device);
}

StreamIndex currentStream(int device) {
  return current_streams[static_cast<size_t>(device)];
}
StreamIndex currentStream() {
  return currentStream(current_device);
}

StreamIndex exchangeCurrentStream(StreamIndex stream) {
  return std::exchange(current_streams[static_cast<size_t>(deviceOf(stream))], stream);
}

StreamIndex poolStream(int device, bool high_priority) {
  check(device);
  const unsigned turn = handed_out[static_cast<size_t>(device)][high_priority ? 1 : 0]++;
  const int first = high_priority ? 1 + kPoolSize : 1;
  return streamIndex(device, first + static_cast<int>(turn % kPoolSize));
}

c10::Stream toStream(StreamIndex stream) {
  const c10::Device device(kType, static_cast<c10::DeviceIndex>(deviceOf(stream)));
  return c10::Stream(c10::Stream::UNSAFE, device, idOf(stream));
}

StreamIndex indexOf(const c10::Stream& stream) {
  TORCH_CHECK(stream.device_type() == kType, stream, " is no stream of a recording device");
  TORCH_CHECK(stream.id() >= 0 && stream.id() < kStreamsPerDevice, stream, " does not exist");
  return streamIndex(indexOr(stream.device()), stream.id());
}

void* handleOf(StreamIndex stream) {
  return &handles[static_cast<size_t>(stream)];
}

StreamIndex fromHandle(const void* handle) {
  const auto* position = static_cast<const char*>(handle);
  const std::less_equal<const char*> not_after;
  if (!not_after(handles.data(), position) || not_after(handles.data() + kStreams, position)) {
    return -1;
  }
  return static_cast<StreamIndex>(position - handles.data());
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    return toDevice(setCurrentDevice(indexOr(device)));
  }
  c10::Device getDevice() const override { return toDevice(current_device); }
  void setDevice(c10::Device device) const override { setCurrentDevice(indexOr(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return toStream(currentStream(indexOr(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return toStream(streamIndex(indexOr(device), 0));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return toStream(poolStream(indexOr(device), high_priority));
  }
  // As for CUDA, lower numbers are higher priorities.
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return toStream(poolStream(indexOr(device), priority < 0));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return toStream(exchangeCurrentStream(indexOf(stream)));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return handleOf(indexOf(stream));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device_index,
              const c10::EventFlag) const override {
    TORCH_CHECK(device_index == -1 || device_index == stream.device_index(), "an event of device ",
                int(device_index), " cannot be recorded on ", stream);
    if (*event == nullptr) *event = new Event;
    Recorder::get().record(*static_cast<Event*>(*event), indexOf(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Recorder::get().block(*static_cast<Event*>(event), indexOf(stream));
  }
  bool queryEvent(void* event) const override {
    requireUncaptured();
    return event == nullptr || Recorder::get().query(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Recorder::get().synchronize(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    requireUncaptured();
    return static_cast<Event*>(second)->milliseconds - static_cast<Event*>(first)->milliseconds;
  }

  bool queryStream(const c10::Stream& stream) const override {
    return Recorder::get().queryStream(indexOf(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Recorder::get().synchronizeStream(indexOf(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Recorder::get().synchronizeDevice(device < 0 ? current_device : device);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get() != nullptr) Recorder::get().recordStream(data.get(), indexOf(stream));
  }

 private:
  static c10::Device toDevice(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }
};

const c10::impl::DeviceGuardImplRegistrar registrar(kType, new Guard);

}  // namespace
}  // namespace recording
