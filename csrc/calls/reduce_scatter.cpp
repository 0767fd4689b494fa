// Reduce-scatters: of one tensor for each output, or of a list with a tensor for each rank.
#include <ATen/ATen.h>

#include <utility>

#include "calls/checks.hpp"
#include "calls/doors.hpp"
#include "reduce/reduce.hpp"

namespace fastcoll {

CallRef Doors::scatterSums(const CallSite& site, Tensors outputs, Tensors inputs,
                           const c10d::ReduceScatterOptions& opts, const Fusion* fusion) const {
  paired(site, outputs, inputs);
  auto call = std::make_shared<Call>(site, outputs);
  Request& request = call->request;
  const DType to = request.dtype;  // that of the outputs
  request.dtype = dtypeOf(inputs[0].scalar_type());
  if (fusion != nullptr) {
    request.in.assign(size_, setWire(*call, request, request.dtype, *fusion));
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
    call->addParts(Call::Side::In, inputs[i]);
    call->addOutput(outputs[i]);
  }
  setReduction(*call, request, opts.reduceOp);
  if (fusion != nullptr) setSquares(*call, to, *fusion);
  return asked(std::move(call), opts, std::move(inputs), std::move(outputs));
}

CallRef Doors::reduceScatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ReduceScatterOptions& opts) const {
  const CallSite site = at(calls::ReduceScatter);
  const at::Tensor& output = single(site, outputs);
  const Tensors& in = onePerRank(site, inputs, "input tensors");
  const std::size_t mine = rank_;
  asLongAs(site, output, "input", mine, in[mine]);
  auto call = std::make_shared<Call>(site, outputs);
  Request& request = call->request;
  bool even = true;
  for (const at::Tensor& piece : in) {
    sameType(site, piece, output);
    even = even && piece.numel() == output.numel();
  }
  call->addList(Call::Side::In, in, even);
  call->addOutput(output, sharesMemory(output, in, mine));
  setReduction(*call, request, opts.reduceOp);
  if (!even) {
    call->site.type = &calls::ReduceScatterUneven;
    // Pieces of different lengths: one reduce to each rank. All ranks have the same list.
    for (std::size_t root = 0; root < in.size(); ++root) {
      Request part = request;
      part.collective = Collective::Reduce;
      part.root = static_cast<int>(root);
      part.count = in[root].numel();
      part.in = {request.in[root]};
      if (root != mine) part.out.clear();
      call->parts.push_back(std::move(part));
    }
  }
  return asked(std::move(call), opts, in, outputs);
}

}  // namespace fastcoll
