// The coalesced collectives of ProcessGroupFastcoll. A list of tensors is one message per dtype.
// Its segments are gathered from the tensors and scattered back, with no flat copy. torch's own
// calls take one dtype, as on other backends; allreduceList takes several.
#include <ATen/ATen.h>

#include <map>

#include "call_checks.hpp"
#include "process_group.hpp"

namespace fastcoll {
namespace {

using Tensors = ProcessGroupFastcoll::Tensors;

/// Indices of tensors, grouped by dtype in the order of first appearance.
std::vector<std::vector<std::size_t>> byType(const Tensors& tensors) {
  std::vector<std::vector<std::size_t>> groups;
  std::map<at::ScalarType, std::size_t> known;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto [place, fresh] = known.emplace(tensors[i].scalar_type(), groups.size());
    if (fresh) groups.emplace_back();
    groups[place->second].push_back(i);
  }
  return groups;
}

}  // namespace

using WorkRef = ProcessGroupFastcoll::WorkRef;

WorkRef ProcessGroupFastcoll::allreduce_coalesced(Tensors& tensors,
                                                  const c10d::AllreduceCoalescedOptions& opts) {
  return guarded([&] {
    oneType(site("all_reduce_coalesced"), tensors);
    return allreduceList(tensors, opts);
  });
}

WorkRef ProcessGroupFastcoll::allreduceList(Tensors& tensors,
                                            const c10d::AllreduceCoalescedOptions& opts,
                                            std::shared_ptr<const AllReduceOptions> onDevice) {
  return guarded([&] {
    const CallSite site = this->site("all_reduce_coalesced");
    if (tensors.empty()) {
      refuse(site, "at least one tensor", "an empty list");
    }
    if (onDevice != nullptr && tensors[0].is_cpu()) {
      refuse(site, "device tensors for a wire dtype, a factor, an algorithm or a bucket",
             "CPU tensors");
    }
    auto task = newTask(site, Collective::AllReduce);
    for (const auto& indices : byType(tensors)) {
      Request request = task->request;
      request.dtype = dtypeOf(tensors[indices[0]].scalar_type());
      request.in.resize(1);
      request.out.resize(1);
      for (const std::size_t i : indices) {
        task->addInPlace(request.in[0], request.out[0], tensors[i]);
        request.count += tensors[i].numel();
      }
      setReduction(site, *task, request, opts.reduceOp);
      task->parts.push_back(std::move(request));
    }
    return launch(std::move(task),
                  {c10d::OpType::ALLREDUCE_COALESCED, "fastcoll:all_reduce", opts.asyncOp,
                   opts.timeout, tensors, tensors, std::move(onDevice)});
  });
}

WorkRef ProcessGroupFastcoll::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                              const c10d::AllgatherOptions& opts) {
  return guarded([&] {
    const CallSite site = this->site("all_gather_into_tensor_coalesced");
    if (outputs.size() != inputs.size() || inputs.empty()) {
      refuse(site, "as many outputs as inputs, at least one",
             concat(outputs.size(), " outputs and ", inputs.size(), " inputs"));
    }
    oneType(site, inputs);
    auto task = newTask(site, Collective::AllGather);
    Request& request = task->request;
    request.joined = true;
    request.dtype = dtypeOf(inputs[0].scalar_type());
    request.in.resize(1);
    request.out.resize(size_);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      sameType(site, inputs[i], outputs[i]);
      if (outputs[i].numel() != inputs[i].numel() * size_) {
        refuse(site, concat("output ", i, " of ", size_, " x ", inputs[i].numel(), " elements"),
               concat(outputs[i].numel()));
      }
      task->addInput(request.in[0], inputs[i]);
      Message whole;
      task->addOutput(whole, outputs[i]);
      const std::size_t each = whole.bytes() / size_;
      for (std::size_t rank = 0; rank < request.out.size() && each > 0; ++rank) {
        request.out[rank].append(whole.contiguous(rank * each, each), each);
      }
      request.count += inputs[i].numel();
    }
    return launch(std::move(task), {c10d::OpType::ALLGATHER_COALESCED, "fastcoll:all_gather",
                                    opts.asyncOp, opts.timeout, inputs, outputs});
  });
}

WorkRef ProcessGroupFastcoll::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& opts) {
  return guarded([&] {
    const CallSite site = this->site("all_gather_coalesced");
    if (outputs.size() != static_cast<std::size_t>(size_)) {
      refuse(site, concat(size_, " lists of outputs, one per rank"), concat(outputs.size()));
    }
    if (inputs.empty()) {
      refuse(site, "at least one input", "none");
    }
    oneType(site, inputs);
    auto task = newTask(site, Collective::AllGather);
    Tensors flat;
    for (const auto& list : outputs) {
      if (list.size() != inputs.size()) {
        refuse(site, concat(inputs.size(), " outputs per rank, as many as inputs"),
               concat(list.size()));
      }
      flat.insert(flat.end(), list.begin(), list.end());
    }
    Request& request = task->request;
    request.dtype = dtypeOf(inputs[0].scalar_type());
    request.in.resize(1);
    request.out.resize(outputs.size());
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      task->addInput(request.in[0], inputs[i]);
      request.count += inputs[i].numel();
      for (std::size_t rank = 0; rank < outputs.size(); ++rank) {
        sameType(site, inputs[i], outputs[rank][i]);
        if (outputs[rank][i].numel() != inputs[i].numel()) {
          refuse(site,
                 concat("output ", i, " of rank ", rank, " of the input's ", inputs[i].numel(),
                        " elements"),
                 concat(outputs[rank][i].numel()));
        }
        task->addOutput(request.out[rank], outputs[rank][i]);
      }
    }
    return launch(std::move(task), {c10d::OpType::ALLGATHER_COALESCED, "fastcoll:all_gather",
                                    opts.asyncOp, opts.timeout, inputs, flat});
  });
}

WorkRef ProcessGroupFastcoll::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  return guarded([&] {
    const CallSite site = this->site("reduce_scatter_tensor_coalesced");
    if (outputs.size() != inputs.size() || inputs.empty()) {
      refuse(site, "as many outputs as inputs, at least one",
             concat(outputs.size(), " outputs and ", inputs.size(), " inputs"));
    }
    oneType(site, inputs);
    auto task = newTask(site, Collective::ReduceScatter);
    Request& request = task->request;
    request.joined = true;
    request.dtype = dtypeOf(inputs[0].scalar_type());
    request.in.resize(size_);
    request.out.resize(1);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      sameType(site, inputs[i], outputs[i]);
      if (inputs[i].numel() != outputs[i].numel() * size_) {
        refuse(site, concat("input ", i, " of ", size_, " x ", outputs[i].numel(), " elements"),
               concat(inputs[i].numel()));
      }
      Message whole;
      task->addInput(whole, inputs[i]);
      const std::size_t each = whole.bytes() / size_;
      for (std::size_t rank = 0; rank < request.in.size() && each > 0; ++rank) {
        request.in[rank].append(whole.contiguous(rank * each, each), each);
      }
      task->addOutput(request.out[0], outputs[i]);
      request.count += outputs[i].numel();
    }
    setReduction(site, *task, request, opts.reduceOp);
    return launch(std::move(task), {c10d::OpType::REDUCE_SCATTER, "fastcoll:reduce_scatter",
                                    opts.asyncOp, opts.timeout, inputs, outputs});
  });
}

}  // namespace fastcoll
