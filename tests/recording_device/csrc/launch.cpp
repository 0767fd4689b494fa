#include "launch.hpp"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace recording {
namespace {

thread_local int depth = 0;

Footprint footprintOf(const at::Tensor& tensor) {
  const auto item = static_cast<int64_t>(tensor.element_size());
  std::vector<int64_t> strides;
  for (const int64_t stride : tensor.strides()) strides.push_back(stride * item);
  return Footprint::strided(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()),
                            tensor.sizes().vec(), strides, item);
}

}  // namespace

Launch::Launch(std::string what, c10::Device device)
    : what_(std::move(what)), guard_(device), stream_(currentStream()) {
  ++depth;
}

Launch::~Launch() {
  --depth;
}

void Launch::add(const at::Tensor& tensor, bool write) {
  if (!outermost() || !isRecording(tensor) || tensor.numel() == 0) return;
  accesses_.push_back({footprintOf(tensor), write});
}

void Launch::done() {
  if (outermost()) Recorder::get().launch(stream_, what_, accesses_);
}

void Launch::synchronize() const {
  if (outermost()) Recorder::get().synchronizeStream(stream_);
}

bool Launch::outermost() const {
  return depth == 1;
}

bool isRecording(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType && tensor.has_storage();
}

at::Tensor onCpu(const at::Tensor& tensor) {
  if (!isRecording(tensor)) return tensor;
  const at::Tensor alias = at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(),
                                         tensor.strides(), tensor.options().device(c10::kCPU));
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

void resizeStorage(const c10::Storage& storage, size_t bytes) {
  Launch launch("resize", storage.device());
  const size_t kept = std::min(bytes, storage.nbytes());
  c10::DataPtr memory = storage.allocator()->allocate(bytes);
  if (kept != 0) {
    const auto from = reinterpret_cast<uintptr_t>(storage.data());
    const auto to = reinterpret_cast<uintptr_t>(memory.get());
    std::memcpy(memory.get(), storage.data(), kept);
    Recorder::get().launch(
        launch.stream(), "resize",
        {{Footprint(from, from + kept), false}, {Footprint(to, to + kept), true}});
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

}  // namespace recording
