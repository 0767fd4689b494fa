// What a device engine learns of the ranks of its host, through the shared memory of the group's
// CPU engine: NCCL reports no rank that has ended, and compares no calls.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/exported.hpp"
#include "shm/control_block.hpp"

namespace fastcoll {

class CallBoard;
class CpuEngine;
class GroupMemory;

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
class FASTCOLL_EXPORTED HostPeers {
 public:
  /// Does not keep the engine.
  explicit HostPeers(std::weak_ptr<CpuEngine> engine) : engine_(std::move(engine)) {}
  /// Meets the group's ranks, or the other rank of a pair. All these ranks call it. Any number of
  /// times. Throws Error.
  void meet(Milliseconds timeout);
  void meet(int peer, Milliseconds timeout);
  /// Shows the ranks of this host a call that all ranks make and that is not refused any more;
  /// returns its number, or 0 if there are none. `others`: a hash of what the signature does not
  /// have of it. One thread at a time.
  std::uint64_t post(const Signature& signature, std::uint64_t others);
  /// Whether the CPU engine has failed, by a fault of this rank or of another one of the host.
  bool aborted();
  /// Its fault.
  Fault recorded();
  /// Records a fault of this engine there, for the ranks of this host. Then this process may end,
  /// and they do not take its end for the cause.
  void record(const Fault& fault);
  /// A fault that this host shows: a rank has ended, has left before a call, or has made another
  /// call. Also warns of a rank that is stopped while the others wait.
  std::optional<HostFault> look(const UnderWay& call);
  /// "; not arrived: rank 2 (pid 4711, host h1), last call all_gather(seq 6), state T (stopped)":
  /// the ranks of this host that a call of that number waits for; "" if there are none.
  std::string late(std::uint64_t number);

 private:
  /// Keeps the engine; nullptr after its end, or if the group has one rank.
  std::shared_ptr<GroupMemory> memory() const;
  std::shared_ptr<CallBoard> board() const;
  /// Whether a rank has ended, or has left before the call.
  bool isLost(const GroupMemory& memory, int peer, const UnderWay& call, TimePoint now);
  void warnOfStopped(const GroupMemory& memory, const CallBoard& board, const UnderWay& call,
                     TimePoint now);

  const std::weak_ptr<CpuEngine> engine_;
  mutable std::mutex mutex_;
  std::shared_ptr<CallBoard> board_;  // used only while the engine lives
  std::mutex looking_;                // guards the rest
  std::map<int, TimePoint> seen_;     // when a rank was seen first that had ended
  std::set<int> stopped_;
  TimePoint states_{};
};

}  // namespace fastcoll
