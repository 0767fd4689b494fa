// Collectives of a group whose ranks are on several hosts: shared memory inside a host, the network
// between the hosts' leaders, and over the network each byte once.
//
// Every rank of a host goes through the same segments of the host's stream: operands in, results
// out. Its leader reads the operands, talks with the other leaders, and writes the results. Long
// messages for one rank alone go past the leaders (long_messages.hpp).
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "../algorithms/algorithm.hpp"
#include "../group/hosts.hpp"
#include "links.hpp"
#include "long_messages.hpp"

namespace fastcoll {

/// Memory that is kept from one collective to the next: fresh pages cost more than copies.
class Scratch {
 public:
  std::uint8_t* get(std::size_t bytes) {
    if (bytes > bytes_) {
      memory_.reset(new std::uint8_t[bytes]);
      bytes_ = bytes;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<std::uint8_t[]> memory_;
  std::size_t bytes_ = 0;
};

/// The first error at a timeout must name the cause, so ranks that wait for a waiting rank report
/// later. A rank that waits for a late or stopped rank of its host reports at once. A leader
/// reports after one grace, because the other hosts report their own late ranks. A rank that waits
/// for its leader, or for a long message, reports after two. A rank reports after three if the rank
/// that it waits for has not completed the collective before.
constexpr Milliseconds kGrace{300};

struct Spanning {
  Hosts hosts;
  SegmentStream* stream = nullptr;  // of the ranks of this host, where there are more than one
  std::unique_ptr<Links> links;     // of the leader
  std::size_t ringBytes = 0;        // equal on all ranks
  TuningTable tuning;
  GroupMemory* memory = nullptr;
  std::function<PeerConnections&()> connections;  // of this rank, for long messages
  std::string prefix;                             // of the present collective's errors
  /// Throws when a rank that shares no memory with this one has told of a fault.
  std::function<void(const std::string& prefix)> checkPeers;
  /// Tells the ranks that share no memory with this one of a fault.
  std::function<void(const Error&)> tellPeers;
  // What the network may read and write while a collective is under way, and if that fails until
  // connections are closed.
  std::vector<Scratch> scratch;
  std::vector<std::unique_ptr<std::uint8_t[]>> copies;  // of long messages that lie in pieces

  /// Most bytes of a segment; see SegmentStream::ringBytes(). Every chunk costs leaders a wait for
  /// the network, so that long ones are faster where the network is.
  std::size_t segmentBytes() const { return std::max<std::size_t>(ringBytes / 4, 64); }
};

/// Runs the collective. After an exception no thread touches the request's memory, as soon as what
/// it has borrowed of `connections` is given back. `prefix` begins the messages of errors.
void runSpanning(Spanning& spanning, const Request& request, std::string prefix);

void spanningReduce(Spanning& spanning, const Request& request);
void spanningBroadcast(Spanning& spanning, const Request& request);
void spanningExchange(Spanning& spanning, const Request& request);
void spanningBarrier(Spanning& spanning, const Request& request);

}  // namespace fastcoll
