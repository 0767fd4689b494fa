#include "torch/tensors.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <numeric>

namespace fastcoll {
namespace {

/// The first byte of a tensor's memory, and the one after the last.
std::pair<const char*, const char*> spanOf(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided) return {nullptr, nullptr};  // refused when it is added
  const auto* const begin = static_cast<const char*>(tensor.data_ptr());
  if (tensor.numel() == 0) return {begin, begin};
  std::int64_t last = 0;  // no stride is negative
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return {begin, begin + (last + 1) * static_cast<std::int64_t>(tensor.element_size())};
}

std::atomic<std::uint64_t>& served() {
  static std::atomic<std::uint64_t> bits{std::uint64_t{1} << int(c10::kCUDA)};
  return bits;
}

}  // namespace

bool needsStaging(const at::Tensor& tensor) {
  return !tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg();
}

bool lieInARow(const Tensors& tensors) {
  const auto* next = static_cast<const char*>(tensors[0].data_ptr());
  for (const at::Tensor& tensor : tensors) {
    if (needsStaging(tensor) || tensor.data_ptr() != next) return false;
    next += tensor.nbytes();
  }
  return true;
}

ErrorSite CallSite::errorSite() const {
  const struct {
    const std::string& name;
    int rank, size;
  } all{*group, rank, size};
  return fastcoll::errorSite(name, all);
}

DType dtypeOf(at::ScalarType type) {
  switch (type) {
#define DTYPE(name, torch, ...) \
  case at::ScalarType::torch:   \
    return DType::name;
#include "base/dtypes.def"
    default:
      return DType::Opaque;
  }
}

bool isServed(c10::DeviceType type) {
  return (served().load(std::memory_order_relaxed) >> int(type) & 1) != 0;
}

void serve(c10::DeviceType type) {
  served().fetch_or(std::uint64_t{1} << int(type), std::memory_order_relaxed);
}

void requireDense(const CallSite& call, const at::Tensor& tensor) {
  if (!tensor.defined()) refuse(call, "a tensor", "an undefined one");
  if (tensor.layout() != at::kStrided) {
    refuse(call, "a dense tensor",
           concat("one of layout ", tensor.layout(),
                  ". Only all_reduce takes sparse COO tensors; use .to_dense()."));
  }
  if (tensor.is_meta()) {
    refuse(call, "a CPU or CUDA tensor",
           "one on device meta, which has no data. Materialise it first (torch.empty_like(tensor, "
           "device=\"cpu\")).");
  }
  if (!tensor.is_cpu() && !isServed(tensor.device().type())) {
    refuse(call, "a CPU or CUDA tensor",
           concat("one on ", tensor.device(),
                  ". Move it to one of them, or use torch's own backend for that device."));
  }
}

// Elements cannot overlap if, sorted by stride, each stride is larger than the reach of all smaller
// ones.
void requireNoOverlap(const CallSite& call, const at::Tensor& tensor) {
  if (tensor.numel() <= 1 || tensor.is_non_overlapping_and_dense()) return;
  std::vector<int64_t> order(tensor.dim());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order,
                    [&](int64_t a, int64_t b) { return tensor.stride(a) < tensor.stride(b); });
  int64_t reach = 0;
  for (const int64_t dim : order) {
    if (tensor.size(dim) == 1) continue;
    if (tensor.stride(dim) <= reach) {
      throw Error(ErrorKind::Value, call.errorSite(),
                  "the elements of an output overlap each other: sizes ", tensor.sizes(),
                  ", strides ", tensor.strides(), ". Use .contiguous() or .clone().");
    }
    reach += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
}

bool sharesMemory(const at::Tensor& tensor, const Tensors& list, std::size_t own) {
  const auto [begin, end] = spanOf(tensor);
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto [from, to] = spanOf(list[i]);
    if (begin >= to || from >= end) continue;
    if (i != own || begin != from || end != to) return true;
  }
  return false;
}

}  // namespace fastcoll

/// For tests, which run the device engine on a device without a GPU.
extern "C" __attribute__((visibility("default"))) void fastcollServeDevice(int type) {
  fastcoll::serve(static_cast<c10::DeviceType>(type));
}
