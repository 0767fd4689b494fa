// All-reduces of dense tensors. A list of tensors is one message per dtype. Its segments are
// gathered from the tensors and scattered back, with no flat copy. torch's own calls take one
// dtype, as on other backends; allReduceList takes several. allReduceFused fuses what would be
// separate passes.
#include <ATen/ATen.h>

#include <algorithm>
#include <map>

#include "calls/checks.hpp"
#include "calls/doors.hpp"

namespace fastcoll {
namespace {

/// The tensors, grouped by dtype in the order of first appearance.
std::vector<Tensors> byType(const Tensors& tensors) {
  std::vector<Tensors> groups;
  std::map<at::ScalarType, std::size_t> known;
  for (const at::Tensor& tensor : tensors) {
    const auto [place, fresh] = known.emplace(tensor.scalar_type(), groups.size());
    if (fresh) groups.emplace_back();
    groups[place->second].push_back(tensor);
  }
  return groups;
}

/// Makes a request of tensors of one dtype. `fixedOrder`: partial sums are not rounded to a wire
/// dtype, since the bits would then depend on which ranks share a host.
void addTensors(Call& call, Request& request, const Tensors& tensors, const c10d::ReduceOp& op,
                const Fusion* fusion, bool fixedOrder) {
  const DType dtype = dtypeOf(tensors[0].scalar_type());
  request.dtype = dtype;
  const Message empty = fusion == nullptr ? Message() : setWire(call, request, dtype, *fusion);
  if (request.dtype != dtype) request.wire = fixedOrder ? Wire::KeepsOrder : Wire::Rounds;
  request.in.assign(1, empty);
  request.out.assign(1, empty);
  request.count = 0;
  for (const at::Tensor& tensor : tensors) {
    call.add(tensor, &request.in[0], &request.out[0]);
    request.count += tensor.numel();
  }
  setReduction(call, request, op);
  if (fusion != nullptr) setSquares(call, request.dtype, *fusion);
}

}  // namespace

CallRef Doors::reduceAll(const CallSite& site, const Tensors& tensors,
                         const c10d::AllreduceOptions& opts, const Fusion* fusion) const {
  auto call = std::make_shared<Call>(site);
  const bool fixedOrder = fusion != nullptr && fixedOrder_;
  const bool several = std::ranges::any_of(tensors, [&](const at::Tensor& tensor) {
    return tensor.scalar_type() != tensors[0].scalar_type();
  });
  if (several) {
    for (const Tensors& group : byType(tensors)) {
      addTensors(*call, call->parts.emplace_back(call->request), group, opts.reduceOp, fusion,
                 fixedOrder);
    }
  } else {
    addTensors(*call, call->request, tensors, opts.reduceOp, fusion, fixedOrder);
  }
  return asked(std::move(call), opts, tensors, tensors);
}

CallRef Doors::allReduce(Tensors& tensors, const c10d::AllreduceOptions& opts) const {
  const CallSite site = at(calls::AllReduce);
  if (single(site, tensors).layout() == at::kSparse) return allReduceSparse(tensors, opts);
  return reduceAll(site, tensors, opts);
}

CallRef Doors::allReduceInto(const at::Tensor& output, const at::Tensor& input,
                             const c10d::AllreduceOptions& opts) const {
  const CallSite site = at(calls::AllReduce);
  sameType(site, input, output);
  asLongAs(site, input, "output", 0, output);
  auto call = std::make_shared<Call>(site, input);
  call->addInput(input);
  call->addOutput(output);
  setReduction(*call, call->request, opts.reduceOp);
  return asked(std::move(call), opts, {input}, {output});
}

CallRef Doors::allReduceCoalesced(Tensors& tensors,
                                  const c10d::AllreduceCoalescedOptions& opts) const {
  const CallSite site = at(calls::AllReduceCoalesced);
  oneType(site, tensors);
  return reduceAll(site, tensors, opts);
}

CallRef Doors::allReduceList(const Tensors& tensors, const c10d::AllreduceOptions& opts,
                             std::shared_ptr<const AllReduceOptions> onDevice,
                             const std::optional<at::Tensor>& squares) const {
  const CallSite site = at(calls::AllReduceCoalesced);
  if (tensors.empty()) {
    refuse(site, "at least one tensor", "an empty list");
  }
  if (onDevice != nullptr && tensors[0].is_cpu()) {
    refuse(site, "device tensors for a wire dtype, a factor, an algorithm or a bucket",
           "CPU tensors");
  }
  CallRef call = reduceAll(site, tensors, opts);
  call->options = std::move(onDevice);
  if (squares) {
    requireDense(site, *squares);
    if (squares->device() != tensors[0].device() || squares->scalar_type() != at::kDouble) {
      refuse(site, concat("squares of float64 on ", tensors[0].device()),
             concat(dtypeName(dtypeOf(squares->scalar_type())), " on ", squares->device()));
    }
    call->keepAlive(*squares);
  }
  return call;
}

CallRef Doors::allReduceFused(const Tensors& tensors, const c10d::AllreduceOptions& opts,
                              const Fusion& fusion) const {
  const CallSite site = at(calls::AllReduceFused);
  oneType(site, tensors);
  return reduceAll(site, tensors, opts, &fusion);
}

}  // namespace fastcoll
