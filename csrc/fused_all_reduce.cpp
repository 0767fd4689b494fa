// An all-reduce of gradients that does on its way what else would be passes of their own: a list of
// tensors is one message, float32 may travel in 16 bits, and the squares of the result are summed.
#include <ATen/ATen.h>

#include "call_checks.hpp"
#include "process_group.hpp"
#include "reduce/reduce.hpp"

namespace fastcoll {
namespace {

void checkSquares(const CallSite& site, const at::Tensor& squares) {
  requireDense(site, squares);
  expect(squares.is_cpu() && squares.scalar_type() == at::kDouble && squares.numel() == 1, site,
         "squares of one float64 element on the CPU",
         concat(squares.numel(), " of ", dtypeName(dtypeOf(squares.scalar_type())), " on ",
                squares.device()));
}

}  // namespace

ProcessGroupFastcoll::WorkRef ProcessGroupFastcoll::allreduceFused(
    Tensors tensors, const c10d::AllreduceOptions& opts, std::optional<at::ScalarType> wire,
    std::optional<at::Tensor> squares) {
  return guarded([&] {
    const CallSite site = this->site("all_reduce_fused");
    expect(!tensors.empty(), site, "at least one tensor", "an empty list");
    auto task = newTask(site, Collective::AllReduce);
    Request& request = task->request;
    const DType dtype = dtypeOf(tensors[0].scalar_type());
    request.dtype = wire ? dtypeOf(*wire) : dtype;
    request.in.resize(1);
    request.out.resize(1);
    if (request.dtype != dtype) {
      if (dtype != DType::Float32) {
        throw Error(ErrorKind::Type, concat(site.prefix(), "expected float32 tensors to travel as ",
                                            dtypeName(request.dtype), ", got ", dtypeName(dtype),
                                            ". Leave the wire dtype out, or cast the tensors."));
      }
      request.in[0] = request.out[0] =
          Message(named(site, [&]() -> const WireCast& { return wireCast(request.dtype); }));
    }
    for (const at::Tensor& tensor : tensors) {
      sameType(site, tensors[0], tensor);
      task->addInPlace(request.in[0], request.out[0], tensor);
      expect(tensor.is_cpu(), site, "CPU tensors", concat("one on ", tensor.device()));
      request.count += static_cast<std::uint64_t>(tensor.numel());
    }
    setReduction(site, *task, request, opts.reduceOp);
    if (squares) {
      checkSquares(site, *squares);
      named(site, [&] { squaresFunction(request.dtype); });
      squares->zero_();
      task->keepAlive(*squares);
      request.squares = squares->mutable_data_ptr<double>();
    }
    return launch(std::move(task), {c10d::OpType::ALLREDUCE, "fastcoll:all_reduce", opts.asyncOp,
                                    opts.timeout, tensors, tensors});
  });
}

}  // namespace fastcoll
