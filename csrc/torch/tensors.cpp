#include "torch/tensors.hpp"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <atomic>
#include <numeric>

#include "base/entry_lock.hpp"

namespace fastcoll {
namespace {

bool needsStaging(const at::Tensor& tensor) {
  return !tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg();
}

/// Whether tensors of equal length are consecutive in memory.
bool lieInARow(const std::vector<at::Tensor>& tensors) {
  const auto* next = static_cast<const char*>(tensors[0].data_ptr());
  for (const at::Tensor& tensor : tensors) {
    if (needsStaging(tensor) || tensor.data_ptr() != next) return false;
    next += tensor.nbytes();
  }
  return true;
}

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
#undef DTYPE
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

TensorTask::TensorTask(const CallSite& call, at::ArrayRef<at::Tensor> share) : site(call) {
  request.collective = site.type->collective;
  if (share.empty()) return;
  request.dtype = dtypeOf(share[0].scalar_type());
  for (const at::Tensor& tensor : share) request.count += tensor.numel();
}

void TensorTask::admit(const at::Tensor& tensor) {
  requireDense(site, tensor);
  if (!device_) device_ = tensor.device();
  if (*device_ != tensor.device()) {
    refuse(site, "all tensors on one device",
           concat("some on ", *device_, " and ", tensor.device(), ". Move them to one."));
  }
}

bool sharesMemory(const at::Tensor& tensor, const std::vector<at::Tensor>& list, std::size_t own) {
  const auto [begin, end] = spanOf(tensor);
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto [from, to] = spanOf(list[i]);
    if (begin >= to || from >= end) continue;
    if (i != own || begin != from || end != to) return true;
  }
  return false;
}

void TensorTask::add(const at::Tensor& tensor, Message* in, Message* out, bool copy) {
  admit(tensor);
  if (tensor.numel() == 0) return;
  if (out != nullptr) requireNoOverlap(site, tensor);
  const bool staged = copy || needsStaging(tensor);
  alive_.push_back(staged ? at::empty(tensor.sizes(), tensor.options().requires_grad(false))
                          : tensor);
  const at::Tensor& place = alive_.back();
  if (in != nullptr) {
    if (staged) before_.push_back({tensor, place});
    in->append(place.data_ptr(), place.nbytes());
  }
  if (out == nullptr) return;
  if (staged) after_.push_back({place, tensor});
  written_.push_back(tensor);
  out->append(place.data_ptr(), place.nbytes());
}

std::vector<at::Tensor> TensorTask::rowFor(const std::vector<at::Tensor>& tensors, bool even) {
  for (const at::Tensor& tensor : tensors) admit(tensor);
  if (!even || device_->is_cpu() || tensors[0].numel() == 0) return {};
  request.contiguousParts = true;  // by the call's form: addresses differ from rank to rank
  if (lieInARow(tensors)) return {};
  const auto ranks = static_cast<std::int64_t>(tensors.size());
  return at::empty({ranks, tensors[0].numel()}, tensors[0].options().requires_grad(false)).unbind();
}

void TensorTask::addInputs(const std::vector<at::Tensor>& tensors, bool even) {
  const auto row = rowFor(tensors, even);
  request.in.resize(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    add(row.empty() ? tensors[i] : row[i], &request.in[i], nullptr);
    if (!row.empty()) before_.push_back({tensors[i], row[i].view(tensors[i].sizes())});
  }
}

void TensorTask::addOutputs(const std::vector<at::Tensor>& tensors, bool even) {
  const auto row = rowFor(tensors, even);
  request.out.resize(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (row.empty()) {
      add(tensors[i], nullptr, &request.out[i]);
      continue;
    }
    requireNoOverlap(site, tensors[i]);
    written_.push_back(tensors[i]);
    alive_.push_back(row[i]);
    after_.push_back({row[i].view(tensors[i].sizes()), tensors[i]});
    request.out[i].append(row[i].data_ptr(), row[i].nbytes());
  }
}

void TensorTask::cut(const Message& whole, std::vector<Message>& into) {
  request.contiguousParts = true;
  into.resize(site.size);
  const std::size_t each = whole.bytes() / into.size();
  for (std::size_t i = 0; i < into.size() && each > 0; ++i) {
    into[i].append(whole.contiguous(i * each, each), each);
  }
}

void TensorTask::addInputParts(const at::Tensor& whole) {
  Message all;
  add(whole, &all, nullptr);
  cut(all, request.in);
}

void TensorTask::addOutputParts(const at::Tensor& whole) {
  Message all;
  add(whole, nullptr, &all);
  cut(all, request.out);
}

std::vector<at::Tensor> TensorTask::memoryOf() const {
  std::vector<at::Tensor> all = alive_;
  for (const Copy& copy : after_) all.push_back(copy.to);
  return all;
}

void TensorTask::prepare() {
  if (before) before();
  if (before_.empty()) return;
  beforeWait();  // they may be long
  at::AutoDispatchBelowADInplaceOrView guard;
  for (const Copy& copy : before_) copy.to.copy_(copy.from);
}

void TensorTask::run(CpuEngine& engine) {
  prepare();
  if (parts.empty()) engine.run(request);
  for (Request& part : parts) {
    part.seq = request.seq;
    part.timeout = request.timeout;
    engine.run(part);
  }
  finish();
}

void TensorTask::finish() {
  if (!after_.empty()) {
    beforeWait();
    at::AutoDispatchBelowADInplaceOrView guard;
    for (const Copy& copy : after_) copy.to.copy_(copy.from);
  }
  if (!countsChanges) return;
  for (const at::Tensor& tensor : written_) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace fastcoll

/// For tests, which run the device engine on a device without a GPU.
extern "C" __attribute__((visibility("default"))) void fastcollServeDevice(int type) {
  fastcoll::serve(static_cast<c10::DeviceType>(type));
}
