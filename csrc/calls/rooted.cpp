// The collectives of ProcessGroupFastcoll in which one rank, the root, has a different part.
#include <ATen/ATen.h>

#include "calls/checks.hpp"
#include "process_group.hpp"

namespace fastcoll {

WorkRef ProcessGroupFastcoll::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  return guarded(calls::Broadcast, [&](const CallSite& site) {
    const at::Tensor& tensor = single(site, tensors);
    requireDense(site, tensor);
    requireNoOverlap(site, tensor);
    auto task = std::make_shared<TensorTask>(site, tensors);
    task->request.root = checkRoot(site, opts.rootRank, opts.rootTensor);
    rank_ == opts.rootRank ? task->addInput(tensor) : task->addOutput(tensor);
    return launch(std::move(task), {opts.asyncOp, opts.timeout, tensors, tensors});
  });
}

WorkRef ProcessGroupFastcoll::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return guarded(calls::Reduce, [&](const CallSite& site) {
    const at::Tensor& tensor = single(site, tensors);
    requireDense(site, tensor);
    requireNoOverlap(site, tensor);
    auto task = std::make_shared<TensorTask>(site, tensors);
    task->request.root = checkRoot(site, opts.rootRank, opts.rootTensor);
    rank_ == opts.rootRank ? task->addInPlace(tensor) : task->addInput(tensor);
    setReduction(*task, task->request, opts.reduceOp);
    return launch(std::move(task), {opts.asyncOp, opts.timeout, tensors, tensors});
  });
}

WorkRef ProcessGroupFastcoll::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::GatherOptions& opts) {
  return guarded(calls::Gather, [&](const CallSite& site) {
    const at::Tensor& input = single(site, inputs);
    auto task = std::make_shared<TensorTask>(site, inputs);
    task->request.root = checkRoot(site, opts.rootRank);
    task->addInput(input);
    Tensors out;
    if (rank_ == opts.rootRank) {
      out = onePerRank(site, outputs, "output tensors on the root");
      for (std::size_t i = 0; i < out.size(); ++i) {
        sameType(site, input, out[i]);
        asLongAs(site, input, "output", i, out[i]);
      }
      task->addOutputs(out, false);
    } else if (!outputs.empty() && !outputs[0].empty()) {
      refuse(site, "no outputs on a rank that is not the root", concat(outputs[0].size()));
    }
    return launch(std::move(task), {opts.asyncOp, opts.timeout, inputs, out});
  });
}

WorkRef ProcessGroupFastcoll::gather_single(at::Tensor& output, at::Tensor& input,
                                            const c10d::GatherOptions& opts) {
  return guarded(calls::GatherSingle, [&](const CallSite& site) {
    auto task = std::make_shared<TensorTask>(site, input);
    task->request.root = checkRoot(site, opts.rootRank);
    task->addInput(input);
    Tensors out;  // on other ranks torch passes an empty output
    if (rank_ == opts.rootRank) {
      requireDense(site, output);
      sameType(site, input, output);
      wholeOf(site, input, "output", output, -1, " on the root");
      task->addOutputParts(output);
      out = {output};
    }
    return launch(std::move(task), {opts.asyncOp, opts.timeout, {input}, out});
  });
}

WorkRef ProcessGroupFastcoll::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                      const c10d::ScatterOptions& opts) {
  return guarded(calls::Scatter, [&](const CallSite& site) {
    const at::Tensor& output = single(site, outputs);
    auto task = std::make_shared<TensorTask>(site, outputs);
    task->request.root = checkRoot(site, opts.rootRank);
    task->addOutput(output);
    Tensors in;
    if (rank_ == opts.rootRank) {
      in = onePerRank(site, inputs, "input tensors on the root");
      for (std::size_t i = 0; i < in.size(); ++i) {
        sameType(site, in[i], output);
        asLongAs(site, output, "input", i, in[i]);
      }
      task->addInputs(in, false);
    } else if (!inputs.empty() && !inputs[0].empty()) {
      refuse(site, "no inputs on a rank that is not the root", concat(inputs[0].size()));
    }
    return launch(std::move(task), {opts.asyncOp, opts.timeout, in, outputs});
  });
}

WorkRef ProcessGroupFastcoll::scatterSingle(const at::Tensor& output, const at::Tensor& input,
                                            const c10d::ScatterOptions& opts) {
  return guarded(calls::ScatterSingle, [&](const CallSite& site) {
    auto task = std::make_shared<TensorTask>(site, output);
    task->request.root = checkRoot(site, opts.rootRank);
    task->addOutput(output);
    Tensors in;  // on other ranks the input is empty
    if (rank_ == opts.rootRank) {
      requireDense(site, input);
      sameType(site, input, output);
      wholeOf(site, output, "input", input, -1, " on the root");
      task->addInputParts(input);
      in = {input};
    }
    return launch(std::move(task), {opts.asyncOp, opts.timeout, in, {output}});
  });
}

}  // namespace fastcoll
