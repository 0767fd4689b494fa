#include "calls/call.hpp"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "base/entry_lock.hpp"

namespace fastcoll {

Call::Call(const CallSite& call, at::ArrayRef<at::Tensor> share) : site(call) {
  request.collective = site.type->collective;
  if (share.empty()) return;
  request.dtype = dtypeOf(share[0].scalar_type());
  for (const at::Tensor& tensor : share) request.count += tensor.numel();
}

void Call::admit(const at::Tensor& tensor) {
  requireDense(site, tensor);
  if (!device_) device_ = tensor.device();
  if (*device_ != tensor.device()) {
    refuse(site, "all tensors on one device",
           concat("some on ", *device_, " and ", tensor.device(), ". Move them to one."));
  }
}

void Call::add(const at::Tensor& tensor, Message* in, Message* out, bool copy) {
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

Tensors Call::rowFor(const Tensors& tensors, bool even) {
  for (const at::Tensor& tensor : tensors) admit(tensor);
  if (!even || device_->is_cpu() || tensors[0].numel() == 0) return {};
  request.contiguousParts = true;  // by the call's form: addresses differ from rank to rank
  if (lieInARow(tensors)) return {};
  const auto ranks = static_cast<std::int64_t>(tensors.size());
  return at::empty({ranks, tensors[0].numel()}, tensors[0].options().requires_grad(false)).unbind();
}

void Call::addList(Side side, const Tensors& tensors, bool even) {
  const auto row = rowFor(tensors, even);
  std::vector<Message>& messages = messagesOf(side);
  messages.resize(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    add(side, row.empty() ? tensors[i] : row[i], messages[i]);
    if (row.empty()) continue;
    const at::Tensor moved = row[i].view(tensors[i].sizes());
    if (side == Side::In) {
      before_.push_back({tensors[i], moved});
      continue;
    }
    requireNoOverlap(site, tensors[i]);
    after_.push_back({moved, tensors[i]});
    written_.back() = tensors[i];
  }
}

void Call::addParts(Side side, const at::Tensor& whole) {
  Message all;
  add(side, whole, all);
  request.contiguousParts = true;
  std::vector<Message>& parts = messagesOf(side);
  parts.resize(site.size);
  const std::size_t each = all.bytes() / parts.size();
  for (std::size_t i = 0; i < parts.size() && each > 0; ++i) {
    parts[i].append(all.contiguous(i * each, each), each);
  }
}

Tensors Call::memoryOf() const {
  Tensors all = alive_;
  for (const Copy& copy : after_) all.push_back(copy.to);
  return all;
}

void Call::prepare() {
  if (before) before();
  if (before_.empty()) return;
  beforeWait();  // they may be long
  at::AutoDispatchBelowADInplaceOrView guard;
  for (const Copy& copy : before_) copy.to.copy_(copy.from);
}

void Call::run(CpuEngine& engine) {
  prepare();
  if (parts.empty()) engine.run(request);
  for (Request& part : parts) {
    part.seq = request.seq;
    part.timeout = request.timeout;
    engine.run(part);
  }
  finish();
}

void Call::finish() {
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

void Call::forget() {
  alive_ = {};
  written_ = {};
  before_ = {};
  after_ = {};
}

}  // namespace fastcoll
