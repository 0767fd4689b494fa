// Every operator without its own kernel runs on CPU; its accesses are reported from its schema.
#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

#include <optional>
#include <set>

#include "launch.hpp"

namespace recording {
namespace {

// Calls f for each tensor of the value, which may be a tensor, a list of tensors, or neither.
template <typename F>
void forEachTensor(const c10::IValue& value, const F& f) {
  if (value.isTensor()) {
    f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) f(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor.has_value()) f(*tensor);
    }
  }
}

bool isWritten(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

c10::Device deviceOf(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> device;
  for (const c10::IValue& argument : arguments) {
    forEachTensor(argument, [&](const at::Tensor& tensor) {
      if (!device && isRecording(tensor)) device = tensor.device();
    });
    if (!device && argument.isDevice()) device = argument.toDevice();
  }
  return device && device->has_index()
             ? *device
             : c10::Device(kType, static_cast<c10::DeviceIndex>(currentDevice()));
}

// Whether a CUDA kernel of this operator makes the host wait, for a value or for a size.
bool waitsForValues(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  if (op.hasTag(at::Tag::data_dependent_output)) return true;
  bool by_mask = false;
  for (const c10::IValue& argument : arguments) {
    if (!argument.isOptionalTensorList()) continue;
    forEachTensor(argument, [&](const at::Tensor& index) {
      by_mask |=
          index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte);
    });
  }
  // Indexing has the tag only because of masks.
  const bool indexing = op.schema().name() == "aten::index";
  return by_mask || (op.hasTag(at::Tag::dynamic_output_shape) && !indexing);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const std::vector<c10::IValue> arguments = torch::jit::last(*stack, count).vec();
  const bool waits = waitsForValues(op, arguments);
  Launch launch(schema.name(), deviceOf(arguments));

  // The running statistics are written although the schema does not declare it: writes to a copy
  // would be lost.
  const bool hidden = schema.name() == "aten::native_batch_norm";
  const std::set<size_t> hidden_writes = hidden ? std::set<size_t>{3, 4} : std::set<size_t>{};
  for (size_t i = 0; i < count; ++i) {
    if (isWritten(schema.arguments()[i])) continue;
    const bool written = hidden_writes.count(i) != 0 && arguments[i].isTensor();
    forEachTensor(arguments[i], [&](const at::Tensor& tensor) {
      written ? launch.write(tensor) : launch.read(tensor);
    });
    if (written) (*stack)[stack->size() - count + i] = onCpu(arguments[i].toTensor());
  }

  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);

  // Only now, because a resized tensor has moved.
  for (size_t i = 0; i < count; ++i) {
    if (!isWritten(schema.arguments()[i])) continue;
    forEachTensor(arguments[i], [&](const at::Tensor& tensor) { launch.write(tensor); });
  }
  const auto results = torch::jit::last(*stack, schema.returns().size());
  for (size_t i = 0; i < results.size(); ++i) {
    if (schema.returns()[i].alias_info() != nullptr) continue;
    forEachTensor(results[i], [&](const at::Tensor& tensor) { launch.write(tensor); });
  }
  launch.done();
  if (waits) launch.synchronize();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Otherwise these would be composed of smaller operators, whose sums differ from CPU's.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* name : {"native_layer_norm", "native_group_norm"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace
}  // namespace recording
