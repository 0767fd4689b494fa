#include "cpu/hosts/multi_host.hpp"

#include <utility>

namespace fastcoll {
namespace {

void run(MultiHost& multiHost, const Request& request) {
  switch (request.collective) {
    case Collective::AllReduce:
    case Collective::Reduce:
    case Collective::ReduceScatter:
      return hierarchicalReduce(multiHost, request);
    case Collective::Broadcast:
      return hierarchicalBroadcast(multiHost, request);
    default:
      return hierarchicalExchange(multiHost, request);
  }
}

}  // namespace

void runMultiHost(MultiHost& multiHost, const Request& request, ErrorSite site) {
  multiHost.site = std::move(site);
  if (multiHost.links == nullptr) return run(multiHost, request);
  try {
    multiHost.links->begin(request, multiHost.site, multiHost.call);
    run(multiHost, request);
  } catch (const Error& error) {
    // Write the fault first: a host that detects closed connections reads it at once.
    if (!isUnexplained(error)) multiHost.faults.publish({error.kind(), error.cause()});
    multiHost.links->close();
    throw;
  } catch (...) {
    // Afterwards no thread uses the memory any more, and the other hosts detect the fault.
    multiHost.links->close();
    throw;
  }
}

}  // namespace fastcoll
