#include "spanning.hpp"

#include <utility>

namespace fastcoll {
namespace {

void run(Spanning& spanning, const Request& request) {
  switch (request.collective) {
    case Collective::AllReduce:
    case Collective::Reduce:
    case Collective::ReduceScatter:
      return hierarchicalReduce(spanning, request);
    case Collective::Broadcast:
      return hierarchicalBroadcast(spanning, request);
    default:
      return hierarchicalExchange(spanning, request);
  }
}

}  // namespace

void runSpanning(Spanning& spanning, const Request& request, std::string prefix) {
  spanning.prefix = std::move(prefix);
  if (spanning.links == nullptr) return run(spanning, request);
  try {
    spanning.links->begin(request, spanning.prefix);
    run(spanning, request);
  } catch (const Error& error) {
    // Write the fault first: a host that detects closed connections reads it at once.
    if (!isUnexplained(error)) spanning.tellPeers(error);
    spanning.links->close();
    throw;
  } catch (...) {
    // Afterwards no thread uses the memory any more, and the other hosts detect the fault.
    spanning.links->close();
    throw;
  }
}

}  // namespace fastcoll
