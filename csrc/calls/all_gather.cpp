// All-gathers: of tensors into one tensor for each, or into a list for each.
#include <ATen/ATen.h>

#include <utility>

#include "calls/checks.hpp"
#include "calls/doors.hpp"

namespace fastcoll {

CallRef Doors::gatherTensors(const CallSite& site, Tensors outputs, Tensors inputs,
                             const c10d::AllgatherOptions& opts) const {
  paired(site, outputs, inputs);
  auto call = std::make_shared<Call>(site, inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    sameType(site, inputs[i], outputs[i]);
    wholeOf(site, inputs[i], "output", outputs[i], inputs.size() == 1 ? -1 : static_cast<int>(i));
    call->addInput(inputs[i]);
    call->addParts(Call::Side::Out, outputs[i]);
  }
  return asked(std::move(call), opts, std::move(inputs), std::move(outputs));
}

/// `lists[i]` has an output for input i from each rank.
CallRef Doors::gatherLists(const CallSite& site, const std::vector<Tensors>& lists,
                           const Tensors& inputs, Tensors outputs,
                           const c10d::AllgatherOptions& opts) const {
  auto call = std::make_shared<Call>(site, inputs);
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
    if (!even) call->site.type = &calls::AllGatherUneven;
    call->addInput(input, sharesMemory(input, list, mine));
    call->addList(Call::Side::Out, list, even);
  }
  return asked(std::move(call), opts, inputs, std::move(outputs));
}

CallRef Doors::allGather(std::vector<Tensors>& outputs, Tensors& inputs,
                         const c10d::AllgatherOptions& opts) const {
  const CallSite site = at(calls::AllGather);
  single(site, inputs);
  const Tensors& list = onePerRank(site, outputs, "output tensors");
  return gatherLists(site, outputs, inputs, list, opts);
}

CallRef Doors::allGatherCoalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::AllgatherOptions& opts) const {
  const CallSite site = at(calls::AllGatherCoalesced);
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
  return gatherLists(site, lists, inputs, std::move(flat), opts);
}

}  // namespace fastcoll
