// The collectives of ProcessGroupFastcoll in which all ranks have the same part. Each checks the
// tensors, describes the transfer, and launches it.
#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "call_checks.hpp"
#include "process_group.hpp"

namespace fastcoll {
namespace {

using Tensors = ProcessGroupFastcoll::Tensors;

std::string sizesOf(const at::Tensor& tensor) {
  return c10::str(tensor.sizes());
}

std::uint64_t elements(const Tensors& tensors) {
  std::uint64_t count = 0;
  for (const auto& tensor : tensors) count += tensor.numel();
  return count;
}

}  // namespace

using WorkRef = ProcessGroupFastcoll::WorkRef;

WorkRef ProcessGroupFastcoll::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return guarded([&] {
    const CallSite site = this->site("all_reduce");
    at::Tensor& tensor = single(site, tensors);
    if (tensor.layout() == at::kSparse) return allreduce_sparse(tensors, opts);
    auto task = newTask(site, Collective::AllReduce);
    Request& request = task->request;
    request.dtype = dtypeOf(tensor.scalar_type());
    request.count = tensor.numel();
    request.in.resize(1);
    request.out.resize(1);
    task->addInPlace(request.in[0], request.out[0], tensor);
    setReduction(site, *task, request, opts.reduceOp);
    return launch(std::move(task), {c10d::OpType::ALLREDUCE, "fastcoll:all_reduce", opts.asyncOp,
                                    opts.timeout, tensors, tensors});
  });
}

WorkRef ProcessGroupFastcoll::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& opts) {
  return guarded([&] {
    const CallSite site = this->site("all_gather");
    at::Tensor& input = single(site, inputs);
    Tensors& out = onePerRank(site, outputs, "output tensors");
    auto task = newTask(site, Collective::AllGather);
    Request& request = task->request;
    request.dtype = dtypeOf(input.scalar_type());
    request.count = input.numel();
    request.in.resize(1);
    task->addInput(request.in[0], input, sharesMemory(input, out, rank_));
    bool even = true;
    for (std::size_t i = 0; i < out.size(); ++i) {
      sameType(site, input, out[i]);
      request.expectedCount.push_back(out[i].numel());
      even = even && out[i].numel() == input.numel();
      // NCCL takes outputs of other lengths, Gloo refuses them. So do we, each on its devices.
      const bool fixed = input.is_cpu() || i == static_cast<std::size_t>(rank_);
      if (fixed && out[i].numel() != input.numel()) {
        refuse(site, concat("output ", i, " of the input's ", input.numel(), " elements"),
               concat(out[i].numel(), ". Pad the tensors, or use all_to_all"));
      }
    }
    if (even) request.expectedCount.clear();
    task->addOutputs(out, even);
    return launch(std::move(task), {c10d::OpType::ALLGATHER, "fastcoll:all_gather", opts.asyncOp,
                                    opts.timeout, inputs, out});
  });
}

WorkRef ProcessGroupFastcoll::_allgather_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::AllgatherOptions& opts) {
  return guarded([&] {
    const CallSite site = this->site("all_gather_into_tensor");
    sameType(site, input, output);
    if (output.numel() != input.numel() * size_) {
      refuse(site, concat("an output of ", size_, " x ", input.numel(), " elements"),
             concat(output.numel(), " in sizes ", sizesOf(output)));
    }
    auto task = newTask(site, Collective::AllGather);
    Request& request = task->request;
    request.dtype = dtypeOf(input.scalar_type());
    request.count = input.numel();
    request.in.resize(1);
    task->addInput(request.in[0], input);
    Message whole;
    task->addOutput(whole, output);
    cut(whole, size_, request.out);
    request.joined = true;
    return launch(std::move(task), {c10d::OpType::_ALLGATHER_BASE,
                                    "fastcoll:_all_gather_base",
                                    opts.asyncOp,
                                    opts.timeout,
                                    {input},
                                    {output}});
  });
}

WorkRef ProcessGroupFastcoll::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                             const c10d::ReduceScatterOptions& opts) {
  return guarded([&] {
    const CallSite site = this->site("reduce_scatter");
    at::Tensor& output = single(site, outputs);
    Tensors& in = onePerRank(site, inputs, "input tensors");
    const std::size_t mine = rank_;
    if (in[mine].numel() != output.numel()) {
      refuse(site, concat("input ", rank_, " of the output's ", output.numel(), " elements"),
             concat(in[mine].numel()));
    }
    auto task = newTask(site, Collective::ReduceScatter);
    Request& request = task->request;
    request.dtype = dtypeOf(output.scalar_type());
    request.count = output.numel();
    request.out.resize(1);
    bool even = true;
    for (const at::Tensor& piece : in) {
      sameType(site, piece, output);
      even = even && piece.numel() == output.numel();
    }
    task->addInputs(in, even);
    task->addOutput(request.out[0], output, sharesMemory(output, in, mine));
    setReduction(site, *task, request, opts.reduceOp);
    if (!even) {
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
    return launch(std::move(task), {c10d::OpType::REDUCE_SCATTER, "fastcoll:reduce_scatter",
                                    opts.asyncOp, opts.timeout, in, outputs});
  });
}

WorkRef ProcessGroupFastcoll::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& opts) {
  return guarded([&] {
    const CallSite site = this->site("reduce_scatter_tensor");
    sameType(site, input, output);
    if (input.numel() != output.numel() * size_) {
      refuse(site, concat("an input of ", size_, " x ", output.numel(), " elements"),
             concat(input.numel(), " in sizes ", sizesOf(input)));
    }
    auto task = newTask(site, Collective::ReduceScatter);
    Request& request = task->request;
    request.dtype = dtypeOf(output.scalar_type());
    request.count = output.numel();
    Message whole;
    task->addInput(whole, input);
    cut(whole, size_, request.in);
    request.joined = true;
    request.out.resize(1);
    task->addOutput(request.out[0], output);
    setReduction(site, *task, request, opts.reduceOp);
    return launch(std::move(task), {c10d::OpType::_REDUCE_SCATTER_BASE,
                                    "fastcoll:_reduce_scatter_base",
                                    opts.asyncOp,
                                    opts.timeout,
                                    {input},
                                    {output}});
  });
}

WorkRef ProcessGroupFastcoll::alltoall(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllToAllOptions& opts) {
  return guarded([&] {
    const CallSite site = this->site("all_to_all");
    const std::size_t ranks = size_;
    if (outputs.size() != ranks || inputs.size() != ranks) {
      refuse(site, concat(size_, " inputs and ", size_, " outputs, one per rank"),
             concat(inputs.size(), " and ", outputs.size()));
    }
    auto task = newTask(site, Collective::AllToAll);
    Request& request = task->request;
    request.dtype = dtypeOf(inputs[0].scalar_type());
    request.count = elements(inputs);
    request.in.resize(ranks);
    request.out.resize(ranks);
    for (std::size_t i = 0; i < ranks; ++i) {
      sameType(site, inputs[0], inputs[i]);
      sameType(site, inputs[0], outputs[i]);
      task->addInput(request.in[i], inputs[i]);
      task->addOutput(request.out[i], outputs[i]);
    }
    const std::size_t mine = rank_;
    if (inputs[mine].numel() != outputs[mine].numel()) {
      refuse(site, concat("input and output ", rank_, " of one length"),
             concat(inputs[mine].numel(), " and ", outputs[mine].numel(), " elements"));
    }
    return launch(std::move(task), {c10d::OpType::ALLTOALL, "fastcoll:all_to_all", opts.asyncOp,
                                    opts.timeout, inputs, outputs});
  });
}

WorkRef ProcessGroupFastcoll::alltoall_base(at::Tensor& output, at::Tensor& input,
                                            std::vector<int64_t>& outputSplits,
                                            std::vector<int64_t>& inputSplits,
                                            const c10d::AllToAllOptions& opts) {
  return guarded([&] {
    const CallSite site = this->site("all_to_all_single");
    sameType(site, input, output);
    auto task = newTask(site, Collective::AllToAll);
    Request& request = task->request;
    request.dtype = dtypeOf(input.scalar_type());
    request.count = input.numel();
    // Splits count rows of the first dimension; none means even parts.
    const auto split = [&](const at::Tensor& tensor, const std::vector<int64_t>& splits,
                           const char* what, const Message& whole, std::vector<Message>& into) {
      const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
      std::vector<int64_t> parts = splits;
      if (parts.empty()) {
        if (rows % size_ != 0) {
          refuse(site, concat("an ", what, " whose first dimension is a multiple of ", size_),
                 sizesOf(tensor));
        }
        parts.assign(size_, rows / size_);
      }
      if (parts.size() != static_cast<std::size_t>(size_)) {
        refuse(site, concat(size_, " ", what, " splits"), concat(parts.size()));
      }
      if (std::any_of(parts.begin(), parts.end(), [](int64_t n) { return n < 0; }) ||
          std::accumulate(parts.begin(), parts.end(), int64_t{0}) != rows) {
        refuse(site, concat(what, " splits that add up to ", rows, " rows"), c10::str(parts));
      }
      const std::size_t perRow = rows == 0 ? 0 : whole.bytes() / rows;
      into.resize(parts.size());
      std::size_t start = 0;
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const std::size_t bytes = perRow * parts[i];
        if (bytes > 0) into[i].append(whole.contiguous(start, bytes), bytes);
        start += bytes;
      }
    };
    // Clone a shared input: output pieces would overwrite input pieces that are not sent yet.
    const bool shared = input.numel() > 0 && input.is_alias_of(output);
    at::Tensor source = shared ? input.clone() : input;
    Message wholeIn;
    Message wholeOut;
    task->addInput(wholeIn, source);
    task->addOutput(wholeOut, output);
    split(input, inputSplits, "input", wholeIn, request.in);
    split(output, outputSplits, "output", wholeOut, request.out);
    const std::size_t mine = rank_;
    if (request.in[mine].bytes() != request.out[mine].bytes()) {
      refuse(site, concat("input and output split ", rank_, " of one length"),
             concat(request.in[mine].bytes(), " and ", request.out[mine].bytes(), " bytes"));
    }
    return launch(std::move(task), {c10d::OpType::ALLTOALL_BASE,
                                    "fastcoll:all_to_all",
                                    opts.asyncOp,
                                    opts.timeout,
                                    {input},
                                    {output}});
  });
}

}  // namespace fastcoll
