#include "cuda/capture.hpp"

#include "cuda/driver.hpp"

namespace fastcoll {
namespace {

// From cuda.h.
constexpr int kNotCapturing = 0;
constexpr int kRelaxed = 2;

const DriverFunction<int(void* stream, int* status)> isCapturing("cuStreamIsCapturing");
const DriverFunction<int(void* stream, int* status, std::uint64_t* id, void** graph, void*, void*)>
    captureInfo("cuStreamGetCaptureInfo_v2");
const DriverFunction<int(void** object, void* given, void (*end)(void*), unsigned count,
                         unsigned noSync)>
    createObject("cuUserObjectCreate");
const DriverFunction<int(void* graph, void* object, unsigned count, unsigned move)> retainObject(
    "cuGraphRetainUserObject");
const DriverFunction<int(int* mode)> exchangeMode("cuThreadExchangeStreamCaptureMode");

}  // namespace

bool isCaptured(const c10::Stream& stream) noexcept {
  const auto ask = isCapturing.find();
  int status = kNotCapturing;
  // The legacy stream returns an error while a stream that it blocks is captured.
  return ask != nullptr && ask(stream.native_handle(), &status) == kDriverSuccess &&
         status != kNotCapturing;
}

Capture captureOf(const c10::Stream& captured) noexcept {
  Capture found{1};
  int status = kNotCapturing;
  if (const auto ask = captureInfo.find()) {
    ask(captured.native_handle(), &status, &found.id, &found.graph, nullptr, nullptr);
  }
  return found;
}

void whenDestroyed(const Capture& capture, std::shared_ptr<std::atomic<bool>> over) {
  using Flag = std::shared_ptr<std::atomic<bool>>;
  const auto create = createObject.find();
  const auto retain = retainObject.find();
  if (capture.graph == nullptr || create == nullptr || retain == nullptr) return;
  // Called on a thread of the driver, which may make no call of it.
  const auto end = [](void* given) {
    const std::unique_ptr<Flag> flag(static_cast<Flag*>(given));
    (*flag)->store(true);
  };
  auto flag = std::make_unique<Flag>(std::move(over));
  void* object = nullptr;
  if (create(&object, flag.get(), end, 1, 1) != kDriverSuccess) return;
  flag.release();
  retain(capture.graph, object, 1, 1);
}

RelaxedCapture::RelaxedCapture() noexcept : exchange_(exchangeMode.find()), before_(kRelaxed) {
  if (exchange_ != nullptr) exchange_(&before_);
}

RelaxedCapture::~RelaxedCapture() {
  if (exchange_ != nullptr) exchange_(&before_);
}

}  // namespace fastcoll
