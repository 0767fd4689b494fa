#include "cuda/capture.hpp"

#include "cuda/driver.hpp"

namespace fastcoll {
namespace {

// From cuda.h.
constexpr int kNotCapturing = 0;
constexpr int kRelaxed = 2;

const DriverFunction<int(void* stream, int* status)> isCapturing("cuStreamIsCapturing");
const DriverFunction<int(int* mode)> exchangeMode("cuThreadExchangeStreamCaptureMode");

}  // namespace

bool isCaptured(const c10::Stream& stream) noexcept {
  const auto ask = isCapturing.find();
  int status = kNotCapturing;
  // The legacy stream returns an error while a stream that it blocks is captured.
  return ask != nullptr && ask(stream.native_handle(), &status) == kDriverSuccess &&
         status != kNotCapturing;
}

RelaxedCapture::RelaxedCapture() noexcept : exchange_(exchangeMode.find()), before_(kRelaxed) {
  if (exchange_ != nullptr) exchange_(&before_);
}

RelaxedCapture::~RelaxedCapture() {
  if (exchange_ != nullptr) exchange_(&before_);
}

}  // namespace fastcoll
