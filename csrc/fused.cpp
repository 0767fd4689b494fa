// Reductions of gradients that fuse what would be separate passes. A list of tensors is one
// message, float32 may travel in 16 bits, and the squares of the result are summed.
#include <ATen/ATen.h>

#include "call_checks.hpp"
#include "process_group.hpp"
#include "reduce/reduce.hpp"

namespace fastcoll {
namespace {

/// Requests the sum of the squares of a result of `dtype` in a tensor, if there is one.
void setSquares(const CallSite& site, TensorTask& task, const std::optional<at::Tensor>& squares,
                DType dtype) {
  if (!squares) return;
  requireDense(site, *squares);
  if (!squares->is_cpu() || squares->scalar_type() != at::kDouble || squares->numel() != 1) {
    refuse(site, "squares of one float64 element on the CPU",
           concat(squares->numel(), " of ", dtypeName(dtypeOf(squares->scalar_type())), " on ",
                  squares->device()));
  }
  named(site, [&] { squaresFunction(dtype); });
  squares->zero_();
  task.keepAlive(*squares);
  task.request.squares = squares->mutable_data_ptr<double>();
}

/// An empty message for tensors of `dtype` that travel as `wire`.
Message travelling(const CallSite& site, DType dtype, DType wire) {
  if (wire == dtype) return {};
  if (dtype != DType::Float32) {
    throw Error(ErrorKind::Type, concat(site.prefix(), "expected float32 tensors to travel as ",
                                        dtypeName(wire), ", got ", dtypeName(dtype),
                                        ". Leave the wire dtype out, or cast the tensors."));
  }
  return Message(named(site, [&]() -> const WireCast& { return wireCast(wire); }));
}

void onCpu(const CallSite& site, const at::Tensor& tensor) {
  if (!tensor.is_cpu()) {
    refuse(site, "CPU tensors", concat("one on ", tensor.device()));
  }
}

}  // namespace

using WorkRef = ProcessGroupFastcoll::WorkRef;

WorkRef ProcessGroupFastcoll::allreduceFused(Tensors tensors, const c10d::AllreduceOptions& opts,
                                             std::optional<at::ScalarType> wire,
                                             std::optional<at::Tensor> squares) {
  return guarded([&] {
    const CallSite site = this->site("all_reduce_fused");
    if (tensors.empty()) {
      refuse(site, "at least one tensor", "an empty list");
    }
    auto task = newTask(site, Collective::AllReduce);
    Request& request = task->request;
    const DType dtype = dtypeOf(tensors[0].scalar_type());
    request.dtype = wire ? dtypeOf(*wire) : dtype;
    request.narrowed = request.dtype != dtype;
    request.in.resize(1);
    request.out.resize(1);
    request.in[0] = request.out[0] = travelling(site, dtype, request.dtype);
    for (const at::Tensor& tensor : tensors) {
      sameType(site, tensors[0], tensor);
      task->addInPlace(request.in[0], request.out[0], tensor);
      onCpu(site, tensor);
      request.count += tensor.numel();
    }
    setReduction(site, *task, request, opts.reduceOp);
    setSquares(site, *task, squares, request.dtype);
    return launch(std::move(task), {c10d::OpType::ALLREDUCE, "fastcoll:all_reduce", opts.asyncOp,
                                    opts.timeout, tensors, tensors});
  });
}

WorkRef ProcessGroupFastcoll::reduceScatterFused(at::Tensor output, at::Tensor input,
                                                 const c10d::ReduceScatterOptions& opts,
                                                 std::optional<at::ScalarType> wire,
                                                 std::optional<at::Tensor> squares) {
  return guarded([&] {
    const CallSite site = this->site("reduce_scatter_fused");
    auto task = newTask(site, Collective::ReduceScatter);
    Request& request = task->request;
    const DType from = dtypeOf(input.scalar_type());
    const DType to = dtypeOf(output.scalar_type());
    request.dtype = wire ? dtypeOf(*wire) : from;
    request.widened = to != request.dtype;
    if (request.widened) {
      named(site, [&] { wireCast(request.dtype); });
      if (to != DType::Float32) {
        refuse(site, concat("an output of float32 or ", dtypeName(request.dtype)), dtypeName(to));
      }
    }
    const std::size_t ranks = size_;
    request.in.assign(ranks, travelling(site, from, request.dtype));
    if (input.numel() != output.numel() * size_) {
      refuse(site, concat("an input of ", size_, " x ", output.numel(), " elements"),
             concat(input.numel()));
    }
    Message whole;
    task->addInput(whole, input);
    onCpu(site, input);
    const std::size_t each = whole.bytes() / ranks;
    for (std::size_t i = 0; i < ranks && each > 0; ++i) {
      request.in[i].append(whole.contiguous(i * each, each), each);
    }
    request.joined = true;
    request.count = output.numel();
    request.out.resize(1);
    task->addOutput(request.out[0], output);
    setReduction(site, *task, request, opts.reduceOp);
    setSquares(site, *task, squares, to);
    return launch(std::move(task), {c10d::OpType::_REDUCE_SCATTER_BASE,
                                    "fastcoll:_reduce_scatter_base",
                                    opts.asyncOp,
                                    opts.timeout,
                                    {input},
                                    {output}});
  });
}

}  // namespace fastcoll
