#include "cuda/compared_calls.hpp"

#include "base/hash.hpp"

namespace fastcoll {
namespace {

/// Whether the request's count must be equal on all ranks.
bool sameCount(const Request& request) {
  switch (request.collective) {
    case Collective::AllReduce:
    case Collective::Broadcast:
    case Collective::Reduce:
      return true;
    case Collective::AllGather:
    case Collective::ReduceScatter:
      return request.contiguousParts;  // else each rank's may be its own
    default:
      return false;
  }
}

Signature comparedOf(const Request& request, std::uint64_t seq) {
  Signature one = request.signature();
  one.seq = seq;
  one.factor = 1.0;  // NCCL lets each rank have its own
  if (!sameCount(request)) one.count = 0;
  return one;
}

}  // namespace

std::optional<ComparedCalls> comparedOf(const std::vector<CallRef>& calls, std::uint64_t seq) {
  std::optional<ComparedCalls> compared;
  const auto add = [&](const Request& request) {
    const Signature one = comparedOf(request, seq);
    if (!compared) {
      compared = {one, 0};
      return;
    }
    const std::uint64_t words[] = {compared->others,         one.count,
                                   std::uint64_t(one.root),  std::uint64_t(one.collective),
                                   std::uint64_t(one.dtype), std::uint64_t(one.op)};
    compared->others = fnv(words, sizeof words);
  };
  for (const CallRef& call : calls) {
    if (call->isMessage()) continue;
    add(call->request);
    if (call->options != nullptr && call->options->wire) ++compared->others;
    for (const Request& part : call->parts) add(part);
  }
  return compared;
}

}  // namespace fastcoll
