// Collectives of a group whose ranks are on several hosts. They use shared memory inside a host,
// and the network between the hosts' leaders. Each byte goes over the network once.
//
// Every rank of a host goes through the same segments of the host's stream: operands in, results
// out. Its leader reads the operands, exchanges data with the other leaders, and writes the
// results. Long messages for one rank alone bypass the leaders (long_messages.hpp).
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "cpu/algorithms/algorithm.hpp"
#include "cpu/hosts/links.hpp"
#include "cpu/hosts/long_messages.hpp"
#include "cpu/hosts/partial_sum.hpp"
#include "group/hosts.hpp"

namespace fastcoll {

/// Memory that is kept for the next collective, because fresh pages cost more than copies.
using Scratch = std::vector<std::uint8_t>;
inline std::uint8_t* enlarged(std::size_t bytes, Scratch& memory) {
  if (memory.size() < bytes) memory = Scratch(bytes);
  return memory.data();
}

/// The first error at a timeout must name the cause, so ranks that wait for a waiting rank report
/// later. A rank that waits for a late or stopped rank of its host reports at once. A leader
/// reports after one grace, because the other hosts report their own late ranks. A rank that waits
/// for its leader, or for a long message, reports after two. A rank reports after three if the rank
/// that it waits for has not completed the collective before.
constexpr Milliseconds kGrace{300};

struct MultiHost {
  explicit MultiHost(GroupFaults& of) : faults(of) {}

  GroupFaults& faults;
  PointToPoint* connections = nullptr;  // of this rank to those of other hosts
  Hosts hosts;
  SumTree sums;                     // of `hosts`
  SegmentStream* stream = nullptr;  // of this host's ranks, if there are several
  std::unique_ptr<Links> links;     // of the leader
  std::size_t ringBytes = 0;        // equal on all ranks
  TuningTable tuning;
  GroupMemory* memory = nullptr;
  trace::RecordId call = 0;  // the present collective in the trace
  ErrorSite site;            // of it
  // Memory that the network may use during a collective and, if that fails, until connections are
  // closed.
  std::vector<Scratch> scratch;
  std::vector<std::unique_ptr<std::uint8_t[]>> copies;  // of long messages that are not contiguous

  /// Most bytes of a segment; see SegmentStream::ringBytes(). Leaders wait for the network at every
  /// chunk, so long chunks are faster if the network is fast.
  std::size_t segmentBytes() const { return std::max<std::size_t>(ringBytes / 4, 64); }
};

/// Runs the collective. After an exception, no thread uses the request's memory once the borrowed
/// `connections` are given back. `site`: of its errors.
void runMultiHost(MultiHost& multiHost, const Request& request, ErrorSite site);

void hierarchicalReduce(MultiHost& multiHost, const Request& request);
void hierarchicalBroadcast(MultiHost& multiHost, const Request& request);
void hierarchicalExchange(MultiHost& multiHost, const Request& request);

}  // namespace fastcoll
