#include "capture.hpp"

#include <dlfcn.h>

#include <atomic>

namespace fastcoll {
namespace {

// From cuda.h.
using StreamIsCapturing = int (*)(void* stream, int* status);
using ExchangeMode = int (*)(int* mode);
constexpr int kSuccess = 0;
constexpr int kNotCapturing = 0;
constexpr int kRelaxed = 2;

std::atomic<void*> exchangeMode{nullptr};

/// The driver is loaded once torch has used a device. Looks the name up again until then.
template <typename Function>
Function ofDriver(std::atomic<void*>& known, const char* name) noexcept {
  void* found = known.load(std::memory_order_acquire);
  if (found == nullptr) {
    if (void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD)) {
      found = ::dlsym(driver, name);
      ::dlclose(driver);  // drops this reference only; the library stays loaded
      known.store(found, std::memory_order_release);
    }
  }
  return reinterpret_cast<Function>(found);
}

}  // namespace

bool isCaptured(const c10::Stream& stream) noexcept {
  static std::atomic<void*> known{nullptr};
  const auto ask = ofDriver<StreamIsCapturing>(known, "cuStreamIsCapturing");
  int status = kNotCapturing;
  // The legacy stream returns an error while a stream that it blocks is captured.
  return ask != nullptr && ask(stream.native_handle(), &status) == kSuccess &&
         status != kNotCapturing;
}

RelaxedCapture::RelaxedCapture() noexcept
    : exchange_(ofDriver<ExchangeMode>(exchangeMode, "cuThreadExchangeStreamCaptureMode")),
      before_(kRelaxed) {
  if (exchange_ != nullptr) exchange_(&before_);
}

RelaxedCapture::~RelaxedCapture() {
  if (exchange_ != nullptr) exchange_(&before_);
}

}  // namespace fastcoll
