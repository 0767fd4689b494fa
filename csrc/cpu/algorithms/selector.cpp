// Selects the algorithm, from values that are equal on all ranks.
#include "cpu/algorithms/algorithm.hpp"

namespace fastcoll {
namespace {

void allReduce(SegmentStream& stream, const Request& request, const TuningTable& tuning) {
  // One shot reads (n - 1) B from its peers. The pipeline reads (n - 1) B / n and writes as much.
  // So the limit falls with n.
  const std::size_t limit =
      std::min(stream.ringBytes() / 4, 2 * tuning.oneShotBytes / stream.size());
  const bool fits = request.in[0].bytes() <= std::max(limit, ControlBlock::kSmallSegmentBytes);
  if (fits) return oneShotAllReduce(stream, request);
  segmentedAllReduce(stream, request, tuning);
}

}  // namespace

void runCollective(SegmentStream& stream, const Request& request, const TuningTable& tuning) {
  switch (request.collective) {
    case Collective::AllReduce:
      return allReduce(stream, request, tuning);
    case Collective::Broadcast:
      return broadcast(stream, request, tuning);
    case Collective::Reduce:
      return reduce(stream, request, tuning);
    case Collective::AllGather:
      return allGather(stream, request, tuning);
    case Collective::Gather:
      return gather(stream, request, tuning);
    case Collective::Scatter:
      return scatter(stream, request, tuning);
    case Collective::ReduceScatter:
      return reduceScatter(stream, request, tuning);
    case Collective::AllToAll:
      return allToAll(stream, request, tuning);
    default:
      return barrier(stream, request);
  }
}

}  // namespace fastcoll
