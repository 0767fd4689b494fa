// What a device engine learns of the ranks of its host, through the shared memory of the group's
// CPU engine: NCCL reports no rank that has ended, and compares no calls.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "shm/control_block.hpp"

namespace fastcoll {

class CpuEngine;

/// The first call under way of a device engine.
struct UnderWay {
  std::string text;          // "all_reduce(seq 7, float32[10])"; "": no call is under way
  std::uint64_t number = 0;  // of HostPeers::post(); 0: not all ranks make this call
  TimePoint since;           // when it was launched
};

/// A fault that this host shows.
struct HostFault {
  Fault fault;
  bool mismatch = false;  // a rank has made another call, so results may be wrong; else it is lost
};

/// From any thread. After the group has ended, no call has an effect.
class HostPeers {
 public:
  virtual ~HostPeers() = default;
  /// Meets the group's ranks, or the other rank of a pair. All these ranks call it. Any number of
  /// times. Throws Error.
  virtual void meet(Milliseconds timeout) = 0;
  virtual void meet(int peer, Milliseconds timeout) = 0;
  /// Shows the ranks of this host a call that all ranks make and that is not refused any more;
  /// returns its number, or 0 if there are none. `others`: a hash of what the signature does not
  /// have of it. One thread at a time.
  virtual std::uint64_t post(const Signature& signature, std::uint64_t others) = 0;
  /// Whether the CPU engine has failed, by a fault of this rank or of another one of the host.
  virtual bool aborted() = 0;
  /// Its fault.
  virtual Fault recorded() = 0;
  /// Records a fault of this engine there, for the ranks of this host. Then this process may end,
  /// and they do not take its end for the cause.
  virtual void record(const Fault& fault) = 0;
  /// A fault that this host shows: a rank has ended, has left before a call, or has made another
  /// call. Also warns of a rank that is stopped while the others wait.
  virtual std::optional<HostFault> look(const UnderWay& call) = 0;
  /// "; not arrived: rank 2 (pid 4711, host h1), last call all_gather(seq 6), state T (stopped)":
  /// the ranks of this host that a call of that number waits for; "" if there are none.
  virtual std::string late(std::uint64_t number) = 0;
};

/// Does not keep the engine.
std::shared_ptr<HostPeers> hostPeers(std::weak_ptr<CpuEngine> engine);

}  // namespace fastcoll
