// The operators that cannot use the fallback: those that make memory, share it or move it to
// another device, and convolution, which torch passes to a device as a whole.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

#include "launch.hpp"

namespace recording {
namespace {

using at::IntArrayRef;
using at::Tensor;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device deviceOr(std::optional<c10::Device> device) {
  if (device && device->has_index()) return *device;
  return {kType, static_cast<c10::DeviceIndex>(currentDevice())};
}

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(deviceOr(device));
  return at::detail::empty_generic(size, c10::GetAllocator(kType), kKeys,
                                   c10::dtype_or_default(dtype), format);
}

Tensor emptyStrided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                    std::optional<at::Layout>, std::optional<c10::Device> device,
                    std::optional<bool>) {
  const c10::DeviceGuard guard(deviceOr(device));
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kType), kKeys,
                                           c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const size_t bytes = at::detail::computeStorageNbytesContiguous(
      size, self.dtype().itemsize(), static_cast<size_t>(self.storage_offset()));
  if (c10::multiply_integers(size) != 0 && bytes > self.storage().nbytes()) {
    resizeStorage(self.storage(), bytes);
  }
  return at::native::resize_(self, size, format);
}

void memoryCopy(const Tensor& from, const Tensor& to) {
  if (to.numel() != 0) onCpu(to).copy_(onCpu(from));
}

// Makes `waiting` wait for all work on `other`.
void wait(StreamIndex waiting, StreamIndex other) {
  if (waiting == other) return;
  Event event;
  Recorder::get().record(event, other);
  Recorder::get().block(event, waiting);
}

Tensor copyFrom(const Tensor& self, const Tensor& dst, bool non_blocking) {
  // Between devices the source's stream copies, ordered with the destination's stream.
  const bool across = isRecording(self) && isRecording(dst) && self.device() != dst.device();
  const StreamIndex other = across ? currentStream(dst.device().index()) : -1;
  Launch launch("aten::copy_", isRecording(self) ? self.device() : dst.device());
  if (across) wait(launch.stream(), other);
  memoryCopy(self, dst);
  launch.read(self);
  launch.write(dst);
  launch.done();
  if (across) wait(other, launch.stream());
  const bool with_host = !isRecording(self) || !isRecording(dst);
  if (with_host && !non_blocking) launch.synchronize();
  return dst;
}

Tensor copyFromAndResize(const Tensor& self, const Tensor& dst) {
  if (dst.sizes() != self.sizes()) dst.resize_(self.sizes());
  return copyFrom(self, dst, false);
}

void recordStream(Tensor& self, c10::Stream stream) {
  const c10::DataPtr& data = self.storage().data_ptr();
  if (data.get() != nullptr) Recorder::get().recordStream(data.get(), indexOf(stream));
}

Tensor toDevice(const Tensor& result, Launch& launch) {
  if (!result.defined()) return result;
  const Tensor moved = at::empty_like(result, result.options().device(deviceOr(std::nullopt)),
                                      at::MemoryFormat::Preserve);
  memoryCopy(result, moved);
  launch.write(moved);
  return moved;
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
                   IntArrayRef output_padding, int64_t groups) {
  Launch launch("aten::convolution", input.device());
  for (const Tensor& tensor : {input, weight, bias.value_or(Tensor())}) launch.read(tensor);
  const Tensor result =
      at::convolution(onCpu(input), onCpu(weight), onCpu(bias.value_or(Tensor())), stride, padding,
                      dilation, transposed, output_padding, groups);
  const Tensor moved = toDevice(result, launch);
  launch.done();
  return moved;
}

std::tuple<Tensor, Tensor, Tensor> convolutionBackward(const Tensor& grad, const Tensor& input,
                                                       const Tensor& weight, IntArrayRef stride,
                                                       IntArrayRef padding, IntArrayRef dilation,
                                                       bool transposed, IntArrayRef output_padding,
                                                       int64_t groups, std::array<bool, 3> wanted) {
  Launch launch("aten::convolution_backward", grad.device());
  for (const Tensor& tensor : {grad, input, weight}) launch.read(tensor);
  const std::array<int64_t, 1> bias_size{grad.size(1)};
  const auto [for_input, for_weight, for_bias] = at::convolution_backward(
      onCpu(grad), onCpu(input), onCpu(weight), IntArrayRef(bias_size), stride, padding, dilation,
      transposed, output_padding, groups, wanted);
  std::tuple<Tensor, Tensor, Tensor> moved{
      toDevice(for_input, launch), toDevice(for_weight, launch), toDevice(for_bias, launch)};
  launch.done();
  return moved;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", emptyStrided);
  library.impl("resize_", resize);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("set_.source_Storage",
               static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("_copy_from", copyFrom);
  library.impl("_copy_from_and_resize", copyFromAndResize);
  library.impl("record_stream", recordStream);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolutionBackward);
}

// A copy resolves these views itself. torch's default, to resolve them by another copy first, would
// never end.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace recording
