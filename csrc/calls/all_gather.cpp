// All-gathers: of tensors into one tensor for each, or into a list for each.
#include <ATen/ATen.h>

#include <utility>

#include "calls/checks.hpp"
#include "process_group.hpp"

namespace fastcoll {

WorkRef ProcessGroupFastcoll::allGather(const CallSite& site, Tensors outputs, Tensors inputs,
                                        const c10d::AllgatherOptions& opts) {
  paired(site, outputs, inputs);
  auto task = std::make_shared<TensorTask>(site, inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    sameType(site, inputs[i], outputs[i]);
    wholeOf(site, inputs[i], "output", outputs[i], inputs.size() == 1 ? -1 : static_cast<int>(i));
    task->addInput(inputs[i]);
    task->addOutputParts(outputs[i]);
  }
  return launch(std::move(task),
                {opts.asyncOp, opts.timeout, std::move(inputs), std::move(outputs)});
}

/// `lists[i]` has an output for input i from each rank.
WorkRef ProcessGroupFastcoll::allGatherLists(const CallSite& site,
                                             const std::vector<Tensors>& lists,
                                             const Tensors& inputs, Tensors outputs,
                                             const c10d::AllgatherOptions& opts) {
  auto task = std::make_shared<TensorTask>(site, inputs);
  const std::size_t mine = rank_;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& input = inputs[i];
    const int place = inputs.size() == 1 ? -1 : static_cast<int>(i);
    const Tensors& list = lists[i];
    bool even = true;
    for (std::size_t rank = 0; rank < list.size(); ++rank) {
      sameType(site, input, list[rank]);
      even = even && list[rank].numel() == input.numel();
      // NCCL takes outputs of other lengths in all_gather, Gloo refuses them. So do we, each on its
      // devices.
      if (!input.is_cpu() && rank != mine && site.type == &calls::AllGather) continue;
      asLongAs(site, input, "output", rank, list[rank], place,
               ". Pad the tensors, or use all_to_all");
    }
    if (!even) task->site.type = &calls::AllGatherUneven;
    task->addInput(input, sharesMemory(input, list, mine));
    task->addOutputs(list, even);
  }
  return launch(std::move(task), {opts.asyncOp, opts.timeout, inputs, std::move(outputs)});
}

WorkRef ProcessGroupFastcoll::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& opts) {
  return guarded(calls::AllGather, [&](const CallSite& site) {
    single(site, inputs);
    const Tensors& list = onePerRank(site, outputs, "output tensors");
    return allGatherLists(site, outputs, inputs, list, opts);
  });
}

WorkRef ProcessGroupFastcoll::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& opts) {
  return guarded(calls::AllGatherCoalesced, [&](const CallSite& site) {
    if (outputs.size() != static_cast<std::size_t>(size_)) {
      refuse(site, concat(size_, " lists of outputs, one per rank"), concat(outputs.size()));
    }
    oneType(site, inputs);
    std::vector<Tensors> lists(inputs.size());
    Tensors flat;
    for (const Tensors& list : outputs) {
      if (list.size() != inputs.size()) {
        refuse(site, concat(inputs.size(), " outputs per rank, as many as inputs"),
               concat(list.size()));
      }
      for (std::size_t i = 0; i < list.size(); ++i) lists[i].push_back(list[i]);
      flat.insert(flat.end(), list.begin(), list.end());
    }
    return allGatherLists(site, lists, inputs, std::move(flat), opts);
  });
}

WorkRef ProcessGroupFastcoll::_allgather_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::AllgatherOptions& opts) {
  return guarded(calls::AllGatherIntoTensor,
                 [&](const CallSite& site) { return allGather(site, {output}, {input}, opts); });
}

WorkRef ProcessGroupFastcoll::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                              const c10d::AllgatherOptions& opts) {
  return guarded(calls::AllGatherIntoTensorCoalesced,
                 [&](const CallSite& site) { return allGather(site, outputs, inputs, opts); });
}

}  // namespace fastcoll
