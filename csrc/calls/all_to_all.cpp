// All-to-alls: of lists of tensors, or of the rows of one tensor.
#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "calls/checks.hpp"
#include "calls/doors.hpp"

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

CallRef Doors::exchange(CallRef call, const c10d::AllToAllOptions& opts, Tensors inputs,
                        Tensors outputs) const {
  const std::size_t mine = rank_;
  const std::size_t in = call->request.in[mine].bytes();
  const std::size_t out = call->request.out[mine].bytes();
  if (in != out) {
    refuse(call->site, concat("input and output ", rank_, " of one length"),
           concat(in, " and ", out, " bytes"));
  }
  return asked(std::move(call), opts, std::move(inputs), std::move(outputs));
}

CallRef Doors::allToAll(Tensors& outputs, Tensors& inputs,
                        const c10d::AllToAllOptions& opts) const {
  const CallSite site = at(calls::AllToAll);
  const std::size_t ranks = size_;
  if (outputs.size() != ranks || inputs.size() != ranks) {
    refuse(site, concat(size_, " inputs and ", size_, " outputs, one per rank"),
           concat(inputs.size(), " and ", outputs.size()));
  }
  auto call = std::make_shared<Call>(site, inputs);
  for (std::size_t i = 0; i < ranks; ++i) {
    sameType(site, inputs[0], inputs[i]);
    sameType(site, inputs[0], outputs[i]);
  }
  call->addList(Call::Side::In, inputs, false);
  call->addList(Call::Side::Out, outputs, false);
  return exchange(std::move(call), opts, inputs, outputs);
}

CallRef Doors::allToAllSingle(const at::Tensor& output, const at::Tensor& input,
                              const std::vector<int64_t>& outputSplits,
                              const std::vector<int64_t>& inputSplits,
                              const c10d::AllToAllOptions& opts) const {
  const CallSite site = at(calls::AllToAllSingle);
  sameType(site, input, output);
  auto call = std::make_shared<Call>(site, input);
  // Copy a shared input: output pieces would overwrite input pieces that are not sent yet.
  const bool shared = input.numel() > 0 && input.is_alias_of(output);
  Message wholeIn;
  Message wholeOut;
  call->add(input, &wholeIn, nullptr, shared);
  call->add(output, nullptr, &wholeOut);
  call->request.in = splitRows(site, input, inputSplits, "input", wholeIn);
  call->request.out = splitRows(site, output, outputSplits, "output", wholeOut);
  return exchange(std::move(call), opts, {input}, {output});
}

}  // namespace fastcoll
