// All-to-alls: of lists of tensors, or of the rows of one tensor.
#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "calls/checks.hpp"
#include "process_group.hpp"

namespace fastcoll {
namespace {

/// Cuts a tensor into a message for each rank. `splits` count rows of the first dimension; none
/// means even parts.
std::vector<Message> splitRows(const CallSite& site, const at::Tensor& tensor,
                               std::vector<int64_t> splits, const char* what,
                               const Message& whole) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    if (rows % site.size != 0) {
      refuse(site, concat("an ", what, " whose first dimension is a multiple of ", site.size),
             concat(tensor.sizes()));
    }
    splits.assign(site.size, rows / site.size);
  }
  if (splits.size() != static_cast<std::size_t>(site.size)) {
    refuse(site, concat(site.size, " ", what, " splits"), concat(splits.size()));
  }
  if (std::ranges::any_of(splits, [](int64_t n) { return n < 0; }) ||
      std::accumulate(splits.begin(), splits.end(), int64_t{0}) != rows) {
    refuse(site, concat(what, " splits that add up to ", rows, " rows"), c10::str(splits));
  }
  const std::size_t perRow = rows == 0 ? 0 : whole.bytes() / rows;
  std::vector<Message> parts(splits.size());
  std::size_t start = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::size_t bytes = perRow * splits[i];
    if (bytes > 0) parts[i].append(whole.contiguous(start, bytes), bytes);
    start += bytes;
  }
  return parts;
}

}  // namespace

WorkRef ProcessGroupFastcoll::allToAll(std::shared_ptr<TensorTask> task, Call call) {
  const std::size_t mine = rank_;
  const std::size_t in = task->request.in[mine].bytes();
  const std::size_t out = task->request.out[mine].bytes();
  if (in != out) {
    refuse(task->site, concat("input and output ", rank_, " of one length"),
           concat(in, " and ", out, " bytes"));
  }
  return launch(std::move(task), std::move(call));
}

WorkRef ProcessGroupFastcoll::alltoall(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllToAllOptions& opts) {
  return guarded(calls::AllToAll, [&](const CallSite& site) {
    const std::size_t ranks = size_;
    if (outputs.size() != ranks || inputs.size() != ranks) {
      refuse(site, concat(size_, " inputs and ", size_, " outputs, one per rank"),
             concat(inputs.size(), " and ", outputs.size()));
    }
    auto task = std::make_shared<TensorTask>(site, inputs);
    for (std::size_t i = 0; i < ranks; ++i) {
      sameType(site, inputs[0], inputs[i]);
      sameType(site, inputs[0], outputs[i]);
    }
    task->addInputs(inputs, false);
    task->addOutputs(outputs, false);
    return allToAll(std::move(task), {opts.asyncOp, opts.timeout, inputs, outputs});
  });
}

WorkRef ProcessGroupFastcoll::alltoall_base(at::Tensor& output, at::Tensor& input,
                                            std::vector<int64_t>& outputSplits,
                                            std::vector<int64_t>& inputSplits,
                                            const c10d::AllToAllOptions& opts) {
  return guarded(calls::AllToAllSingle, [&](const CallSite& site) {
    sameType(site, input, output);
    auto task = std::make_shared<TensorTask>(site, input);
    // Copy a shared input: output pieces would overwrite input pieces that are not sent yet.
    const bool shared = input.numel() > 0 && input.is_alias_of(output);
    Message wholeIn;
    Message wholeOut;
    task->add(input, &wholeIn, nullptr, shared);
    task->add(output, nullptr, &wholeOut);
    task->request.in = splitRows(site, input, inputSplits, "input", wholeIn);
    task->request.out = splitRows(site, output, outputSplits, "output", wholeOut);
    return allToAll(std::move(task), {opts.asyncOp, opts.timeout, {input}, {output}});
  });
}

}  // namespace fastcoll
