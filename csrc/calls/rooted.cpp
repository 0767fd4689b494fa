// The collectives of ProcessGroupFastcoll in which one rank, the root, has a different part.
#include <ATen/ATen.h>

#include "calls/checks.hpp"
#include "calls/doors.hpp"

namespace fastcoll {

CallRef Doors::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) const {
  const CallSite site = at(calls::Broadcast);
  const at::Tensor& tensor = single(site, tensors);
  requireDense(site, tensor);
  requireNoOverlap(site, tensor);
  auto call = std::make_shared<Call>(site, tensors);
  call->request.root = checkRoot(site, opts.rootRank, opts.rootTensor);
  rank_ == opts.rootRank ? call->addInput(tensor) : call->addOutput(tensor);
  return asked(std::move(call), opts, tensors, tensors);
}

CallRef Doors::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) const {
  const CallSite site = at(calls::Reduce);
  const at::Tensor& tensor = single(site, tensors);
  requireDense(site, tensor);
  requireNoOverlap(site, tensor);
  auto call = std::make_shared<Call>(site, tensors);
  call->request.root = checkRoot(site, opts.rootRank, opts.rootTensor);
  rank_ == opts.rootRank ? call->addInPlace(tensor) : call->addInput(tensor);
  setReduction(*call, call->request, opts.reduceOp);
  return asked(std::move(call), opts, tensors, tensors);
}

CallRef Doors::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                      const c10d::GatherOptions& opts) const {
  const CallSite site = at(calls::Gather);
  const at::Tensor& input = single(site, inputs);
  auto call = std::make_shared<Call>(site, inputs);
  call->request.root = checkRoot(site, opts.rootRank);
  call->addInput(input);
  Tensors out;
  if (rank_ == opts.rootRank) {
    out = onePerRank(site, outputs, "output tensors on the root");
    for (std::size_t i = 0; i < out.size(); ++i) {
      sameType(site, input, out[i]);
      asLongAs(site, input, "output", i, out[i]);
    }
    call->addList(Call::Side::Out, out, false);
  } else if (!outputs.empty() && !outputs[0].empty()) {
    refuse(site, "no outputs on a rank that is not the root", concat(outputs[0].size()));
  }
  return asked(std::move(call), opts, inputs, out);
}

CallRef Doors::gatherSingle(const at::Tensor& output, const at::Tensor& input,
                            const c10d::GatherOptions& opts) const {
  const CallSite site = at(calls::GatherSingle);
  auto call = std::make_shared<Call>(site, input);
  call->request.root = checkRoot(site, opts.rootRank);
  call->addInput(input);
  Tensors out;  // on other ranks torch passes an empty output
  if (rank_ == opts.rootRank) {
    requireDense(site, output);
    sameType(site, input, output);
    wholeOf(site, input, "output", output, -1, " on the root");
    call->addParts(Call::Side::Out, output);
    out = {output};
  }
  return asked(std::move(call), opts, {input}, out);
}

CallRef Doors::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                       const c10d::ScatterOptions& opts) const {
  const CallSite site = at(calls::Scatter);
  const at::Tensor& output = single(site, outputs);
  auto call = std::make_shared<Call>(site, outputs);
  call->request.root = checkRoot(site, opts.rootRank);
  call->addOutput(output);
  Tensors in;
  if (rank_ == opts.rootRank) {
    in = onePerRank(site, inputs, "input tensors on the root");
    for (std::size_t i = 0; i < in.size(); ++i) {
      sameType(site, in[i], output);
      asLongAs(site, output, "input", i, in[i]);
    }
    call->addList(Call::Side::In, in, false);
  } else if (!inputs.empty() && !inputs[0].empty()) {
    refuse(site, "no inputs on a rank that is not the root", concat(inputs[0].size()));
  }
  return asked(std::move(call), opts, in, outputs);
}

CallRef Doors::scatterSingle(const at::Tensor& output, const at::Tensor& input,
                             const c10d::ScatterOptions& opts) const {
  const CallSite site = at(calls::ScatterSingle);
  auto call = std::make_shared<Call>(site, output);
  call->request.root = checkRoot(site, opts.rootRank);
  call->addOutput(output);
  Tensors in;  // on other ranks the input is empty
  if (rank_ == opts.rootRank) {
    requireDense(site, input);
    sameType(site, input, output);
    wholeOf(site, output, "input", input, -1, " on the root");
    call->addParts(Call::Side::In, input);
    in = {input};
  }
  return asked(std::move(call), opts, in, {output});
}

}  // namespace fastcoll
