// The collectives of ProcessGroupFastcoll in which one rank, the root, has a different part.
#include <ATen/ATen.h>

#include "call_checks.hpp"
#include "process_group.hpp"

namespace fastcoll {

using Tensors = ProcessGroupFastcoll::Tensors;
using WorkRef = ProcessGroupFastcoll::WorkRef;

WorkRef ProcessGroupFastcoll::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  return guarded([&] {
    const CallSite site = this->site("broadcast");
    at::Tensor& tensor = single(site, tensors);
    requireDense(site, tensor);
    requireNoOverlap(site, tensor);
    auto task = newTask(site, Collective::Broadcast);
    Request& request = task->request;
    request.root = checkRoot(site, opts.rootRank, opts.rootTensor);
    request.dtype = dtypeOf(tensor.scalar_type());
    request.count = tensor.numel();
    if (rank_ == request.root) {
      request.in.resize(1);
      task->addInput(request.in[0], tensor);
    } else {
      request.out.resize(1);
      task->addOutput(request.out[0], tensor);
    }
    return launch(std::move(task), {c10d::OpType::BROADCAST, "fastcoll:broadcast", opts.asyncOp,
                                    opts.timeout, tensors, tensors});
  });
}

WorkRef ProcessGroupFastcoll::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return guarded([&] {
    const CallSite site = this->site("reduce");
    at::Tensor& tensor = single(site, tensors);
    requireDense(site, tensor);
    requireNoOverlap(site, tensor);
    auto task = newTask(site, Collective::Reduce);
    Request& request = task->request;
    request.root = checkRoot(site, opts.rootRank, opts.rootTensor);
    request.dtype = dtypeOf(tensor.scalar_type());
    request.count = tensor.numel();
    request.in.resize(1);
    if (rank_ == request.root) {
      request.out.resize(1);
      task->addInPlace(request.in[0], request.out[0], tensor);
    } else {
      task->addInput(request.in[0], tensor);
    }
    setReduction(site, *task, request, opts.reduceOp);
    return launch(std::move(task), {c10d::OpType::REDUCE, "fastcoll:reduce", opts.asyncOp,
                                    opts.timeout, tensors, tensors});
  });
}

WorkRef ProcessGroupFastcoll::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::GatherOptions& opts) {
  return guarded([&] {
    const CallSite site = this->site("gather");
    at::Tensor& input = single(site, inputs);
    auto task = newTask(site, Collective::Gather);
    Request& request = task->request;
    request.root = checkRoot(site, opts.rootRank);
    request.dtype = dtypeOf(input.scalar_type());
    request.count = input.numel();
    request.in.resize(1);
    task->addInput(request.in[0], input);
    Tensors out;
    if (rank_ == request.root) {
      out = onePerRank(site, outputs, "output tensors on the root");
      request.out.resize(out.size());
      for (std::size_t i = 0; i < out.size(); ++i) {
        sameType(site, input, out[i]);
        if (out[i].numel() != input.numel()) {
          refuse(site, concat("output ", i, " of the input's ", input.numel(), " elements"),
                 concat(out[i].numel()));
        }
        task->addOutput(request.out[i], out[i]);
      }
    } else if (!outputs.empty() && !outputs[0].empty()) {
      refuse(site, "no outputs on a rank that is not the root", concat(outputs[0].size()));
    }
    return launch(std::move(task), {c10d::OpType::GATHER, "fastcoll:gather", opts.asyncOp,
                                    opts.timeout, inputs, out});
  });
}

WorkRef ProcessGroupFastcoll::gather_single(at::Tensor& output, at::Tensor& input,
                                            const c10d::GatherOptions& opts) {
  return guarded([&] {
    const CallSite site = this->site("gather_single");
    auto task = newTask(site, Collective::Gather);
    Request& request = task->request;
    request.root = checkRoot(site, opts.rootRank);
    request.dtype = dtypeOf(input.scalar_type());
    request.count = input.numel();
    request.in.resize(1);
    task->addInput(request.in[0], input);
    Tensors out;  // on other ranks torch passes an empty output
    if (rank_ == request.root) {
      sameType(site, input, output);
      if (output.numel() != input.numel() * size_) {
        refuse(site, concat("an output of ", size_, " x ", input.numel(), " elements on the root"),
               concat(output.numel(), " in sizes ", c10::str(output.sizes())));
      }
      Message whole;
      task->addOutput(whole, output);
      cut(whole, size_, request.out);
      out = {output};
    }
    return launch(
        std::move(task),
        {c10d::OpType::GATHER, "fastcoll:gather", opts.asyncOp, opts.timeout, {input}, out});
  });
}

WorkRef ProcessGroupFastcoll::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                      const c10d::ScatterOptions& opts) {
  return guarded([&] {
    const CallSite site = this->site("scatter");
    at::Tensor& output = single(site, outputs);
    auto task = newTask(site, Collective::Scatter);
    Request& request = task->request;
    request.root = checkRoot(site, opts.rootRank);
    request.dtype = dtypeOf(output.scalar_type());
    request.count = output.numel();
    request.out.resize(1);
    task->addOutput(request.out[0], output);
    Tensors in;
    if (rank_ == request.root) {
      in = onePerRank(site, inputs, "input tensors on the root");
      request.in.resize(in.size());
      for (std::size_t i = 0; i < in.size(); ++i) {
        sameType(site, in[i], output);
        if (in[i].numel() != output.numel()) {
          refuse(site, concat("input ", i, " of the output's ", output.numel(), " elements"),
                 concat(in[i].numel()));
        }
        task->addInput(request.in[i], in[i]);
      }
    } else if (!inputs.empty() && !inputs[0].empty()) {
      refuse(site, "no inputs on a rank that is not the root", concat(inputs[0].size()));
    }
    return launch(std::move(task), {c10d::OpType::SCATTER, "fastcoll:scatter", opts.asyncOp,
                                    opts.timeout, in, outputs});
  });
}

}  // namespace fastcoll
