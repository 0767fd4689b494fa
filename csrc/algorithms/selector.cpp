#include "selector.hpp"

namespace fastcoll {

Algorithm selectAllReduce(const SelectorTable& table, std::size_t bytes, int ranks,
                          std::size_t segmentBytes) {
  // One shot reads (n - 1) B where the pipeline reads 2 (n - 1) B / n: its limit falls with n.
  const std::size_t limit =
      std::min(segmentBytes, 2 * table.oneShotAllReduceBytes / static_cast<std::size_t>(ranks));
  const bool fits = bytes <= std::max(limit, ControlBlock::kSmallSlotBytes);
  return fits ? Algorithm::OneShot : Algorithm::Segmented;
}

Arrival Request::arrival() const {
  Arrival arrival{};
  arrival.seq = seq;
  arrival.count = count;
  arrival.factor = factor;
  arrival.root = root;
  arrival.collective = collective;
  arrival.dtype = dtype;
  arrival.op = op;
  return arrival;
}

void runCollective(SegmentStream& stream, const Request& request) {
  switch (request.collective) {
    case Collective::AllReduce:
      if (selectAllReduce(SelectorTable{}, request.in[0].bytes(), stream.size(),
                          stream.segmentBytes()) == Algorithm::OneShot) {
        return oneShotAllReduce(stream, request);
      }
      return segmentedAllReduce(stream, request);
    case Collective::Broadcast:
      return broadcast(stream, request);
    case Collective::Reduce:
      return reduce(stream, request);
    case Collective::AllGather:
      return allGather(stream, request);
    case Collective::Gather:
      return gather(stream, request);
    case Collective::Scatter:
      return scatter(stream, request);
    case Collective::ReduceScatter:
      return reduceScatter(stream, request);
    case Collective::AllToAll:
      return allToAll(stream, request);
    default:
      return barrier(stream, request);
  }
}

}  // namespace fastcoll
