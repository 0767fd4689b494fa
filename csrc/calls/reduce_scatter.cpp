// Reduce-scatters: of one tensor for each output, or of a list with a tensor for each rank.
#include <ATen/ATen.h>

#include <utility>

#include "calls/checks.hpp"
#include "process_group.hpp"
#include "reduce/reduce.hpp"

namespace fastcoll {

WorkRef ProcessGroupFastcoll::reduceScatter(const CallSite& site, Tensors outputs, Tensors inputs,
                                            const c10d::ReduceScatterOptions& opts,
                                            const Fusion* fusion) {
  paired(site, outputs, inputs);
  auto task = std::make_shared<TensorTask>(site, outputs);
  Request& request = task->request;
  const DType to = request.dtype;  // that of the outputs
  request.dtype = dtypeOf(inputs[0].scalar_type());
  if (fusion != nullptr) {
    request.in.assign(size_, setWire(*task, request, request.dtype, *fusion));
  }
  request.outputFloat32 = fusion != nullptr && to != request.dtype;
  if (request.outputFloat32) {
    named(site, [&] { wireCast(request.dtype); });
    if (to != DType::Float32) {
      refuse(site, concat("an output of float32 or ", dtypeName(request.dtype)), dtypeName(to));
    }
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (fusion == nullptr) sameType(site, inputs[i], outputs[i]);
    wholeOf(site, outputs[i], "input", inputs[i], inputs.size() == 1 ? -1 : static_cast<int>(i));
    task->addInputParts(inputs[i]);
    task->addOutput(outputs[i]);
  }
  setReduction(*task, request, opts.reduceOp);
  if (fusion != nullptr) setSquares(*task, to, *fusion);
  return launch(std::move(task),
                {opts.asyncOp, opts.timeout, std::move(inputs), std::move(outputs)});
}

WorkRef ProcessGroupFastcoll::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& opts) {
  return guarded(calls::ReduceScatterTensor, [&](const CallSite& site) {
    return reduceScatter(site, {output}, {input}, opts);
  });
}

WorkRef ProcessGroupFastcoll::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  return guarded(calls::ReduceScatterTensorCoalesced,
                 [&](const CallSite& site) { return reduceScatter(site, outputs, inputs, opts); });
}

WorkRef ProcessGroupFastcoll::reduceScatterFused(const at::Tensor& output, const at::Tensor& input,
                                                 const c10d::ReduceScatterOptions& opts,
                                                 const Fusion& fusion) {
  return guarded(calls::ReduceScatterFused, [&](const CallSite& site) {
    return reduceScatter(site, {output}, {input}, opts, &fusion);
  });
}

WorkRef ProcessGroupFastcoll::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                             const c10d::ReduceScatterOptions& opts) {
  return guarded(calls::ReduceScatter, [&](const CallSite& site) {
    const at::Tensor& output = single(site, outputs);
    const Tensors& in = onePerRank(site, inputs, "input tensors");
    const std::size_t mine = rank_;
    asLongAs(site, output, "input", mine, in[mine]);
    auto task = std::make_shared<TensorTask>(site, outputs);
    Request& request = task->request;
    bool even = true;
    for (const at::Tensor& piece : in) {
      sameType(site, piece, output);
      even = even && piece.numel() == output.numel();
    }
    task->addInputs(in, even);
    task->addOutput(output, sharesMemory(output, in, mine));
    setReduction(*task, request, opts.reduceOp);
    if (!even) {
      task->site.type = &calls::ReduceScatterUneven;
      // Pieces of different lengths: one reduce to each rank. All ranks have the same list.
      for (std::size_t root = 0; root < in.size(); ++root) {
        Request part = request;
        part.collective = Collective::Reduce;
        part.root = static_cast<int>(root);
        part.count = in[root].numel();
        part.in = {request.in[root]};
        if (root != mine) part.out.clear();
        task->parts.push_back(std::move(part));
      }
    }
    return launch(std::move(task), {opts.asyncOp, opts.timeout, in, outputs});
  });
}

}  // namespace fastcoll
