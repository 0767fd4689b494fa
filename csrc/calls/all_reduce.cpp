// All-reduces of dense tensors. A list of tensors is one message per dtype. Its segments are
// gathered from the tensors and scattered back, with no flat copy. torch's own calls take one
// dtype, as on other backends; allreduceList takes several. allreduceFused fuses what would be
// separate passes.
#include <ATen/ATen.h>

#include <algorithm>
#include <map>

#include "calls/checks.hpp"
#include "process_group.hpp"

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
void addTensors(TensorTask& task, Request& request, const Tensors& tensors,
                const c10d::ReduceOp& op, const Fusion* fusion, bool fixedOrder) {
  const DType dtype = dtypeOf(tensors[0].scalar_type());
  request.dtype = dtype;
  const Message empty = fusion == nullptr ? Message() : setWire(task, request, dtype, *fusion);
  if (request.dtype != dtype) request.wire = fixedOrder ? Wire::KeepsOrder : Wire::Rounds;
  request.in.assign(1, empty);
  request.out.assign(1, empty);
  request.count = 0;
  for (const at::Tensor& tensor : tensors) {
    task.add(tensor, &request.in[0], &request.out[0]);
    request.count += tensor.numel();
  }
  setReduction(task, request, op);
  if (fusion != nullptr) setSquares(task, request.dtype, *fusion);
}

}  // namespace

WorkRef ProcessGroupFastcoll::allReduce(const CallSite& site, const Tensors& tensors,
                                        const c10d::AllreduceOptions& opts, const Fusion* fusion,
                                        std::shared_ptr<const AllReduceOptions> onDevice) {
  auto task = std::make_shared<TensorTask>(site);
  const bool fixedOrder = fusion != nullptr && engine_->config().settings.order == "fixed";
  const bool several = std::ranges::any_of(tensors, [&](const at::Tensor& tensor) {
    return tensor.scalar_type() != tensors[0].scalar_type();
  });
  if (several) {
    for (const Tensors& group : byType(tensors)) {
      addTensors(*task, task->parts.emplace_back(task->request), group, opts.reduceOp, fusion,
                 fixedOrder);
    }
  } else {
    addTensors(*task, task->request, tensors, opts.reduceOp, fusion, fixedOrder);
  }
  return launch(std::move(task),
                {opts.asyncOp, opts.timeout, tensors, tensors, std::move(onDevice)});
}

WorkRef ProcessGroupFastcoll::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return guarded(calls::AllReduce, [&](const CallSite& site) {
    if (single(site, tensors).layout() == at::kSparse) return allreduce_sparse(tensors, opts);
    return allReduce(site, tensors, opts);
  });
}

WorkRef ProcessGroupFastcoll::allreduceInto(const at::Tensor& output, const at::Tensor& input,
                                            const c10d::AllreduceOptions& opts) {
  return guarded(calls::AllReduce, [&](const CallSite& site) {
    sameType(site, input, output);
    asLongAs(site, input, "output", 0, output);
    auto task = std::make_shared<TensorTask>(site, input);
    task->addInput(input);
    task->addOutput(output);
    setReduction(*task, task->request, opts.reduceOp);
    return launch(std::move(task), {opts.asyncOp, opts.timeout, {input}, {output}});
  });
}

WorkRef ProcessGroupFastcoll::allreduce_coalesced(Tensors& tensors,
                                                  const c10d::AllreduceCoalescedOptions& opts) {
  return guarded(calls::AllReduceCoalesced, [&](const CallSite& site) {
    oneType(site, tensors);
    return allReduce(site, tensors, opts);
  });
}

WorkRef ProcessGroupFastcoll::allreduceList(const Tensors& tensors,
                                            const c10d::AllreduceOptions& opts,
                                            std::shared_ptr<const AllReduceOptions> onDevice) {
  return guarded(calls::AllReduceCoalesced, [&](const CallSite& site) {
    if (tensors.empty()) {
      refuse(site, "at least one tensor", "an empty list");
    }
    if (onDevice != nullptr && tensors[0].is_cpu()) {
      refuse(site, "device tensors for a wire dtype, a factor, an algorithm or a bucket",
             "CPU tensors");
    }
    return allReduce(site, tensors, opts, nullptr, std::move(onDevice));
  });
}

WorkRef ProcessGroupFastcoll::allreduceFused(const Tensors& tensors,
                                             const c10d::AllreduceOptions& opts,
                                             const Fusion& fusion) {
  return guarded(calls::AllReduceFused, [&](const CallSite& site) {
    oneType(site, tensors);
    return allReduce(site, tensors, opts, &fusion);
  });
}

}  // namespace fastcoll
