// How the ranks of a group find each other and agree on one transport.
//
// Store values cannot be trusted to be fresh: torchrun reuses its store after a restart, and a
// process may create a group anew under the same prefix. So every rank's record holds a nonce made
// now, and a vote counts only for exactly the set of nonces that all ranks see:
//
//   r/<rank>, roster the ranks' records; see roster.hpp
//   <H>/v            whether each rank shares memory with those of its host: "shm", or why not;
//                    all ranks follow from all votes which hosts' ranks stay apart
//   c/<nonce>        the rank has come to the first collective, and waits
//   p/<pair>/<rank>  the rank wants to connect with the other of the pair, for point-to-point
//   f/<H>            what some rank failed with; see told_fault.hpp
//
// H, the roster's id, is equal on all ranks that believe one roster. A rank that sees another
// roster starts over with the new H. A key that names H cannot be stale, for H contains the
// reader's own fresh nonce.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../base/clock.hpp"
#include "../base/cores.hpp"
#include "../base/error.hpp"
#include "../base/store.hpp"
#include "../transport/group_memory.hpp"
#include "hosts.hpp"
#include "roster.hpp"
#include "told_fault.hpp"

namespace fastcoll {

/// What a rank says of itself. Fixed size; checked for length, magic and version before use.
struct GroupRecord {
  std::uint64_t magic;
  std::uint32_t abi;
  std::uint32_t bytesOfThis;
  std::uint64_t nonce;       // of this instance of the group
  std::uint64_t generation;  // of torchrun's restarts: records of another one may not be ours
  ProcessAddress process;
  std::uint64_t networkNamespace;
  std::uint64_t pidNamespace;
  std::uint64_t processStart;  // with the pid: which process this is
  std::uint64_t processBegan;  // the same in nanoseconds since boot
  std::uint64_t createdAt;     // when the group was created, in nanoseconds since boot
  std::uint32_t rank;
  std::uint32_t size;
  std::uint32_t uid;
  std::uint32_t pid;
  std::uint64_t ringBytes;
  std::uint64_t tuning;     // TuningTable::fingerprint
  std::uint32_t transport;  // TransportChoice
  std::uint32_t reserved;
  CoreSet cores;  // that the thread which made the group may run on
  char bootId[40];
  char hostId[64];  // FASTCOLL_HOST_ID, or ""
  char host[64];
  char version[32];
};

/// Hash of torchrun's run id and restart count, 0 outside torchrun.
std::uint64_t restartGeneration();

struct Agreement {
  Hosts hosts;
  std::string reason;     // why there is more than one host
  std::string id;         // H, for keys that must be fresh
  bool coreEach = false;  // this rank may spin while it waits for the others
};

class Rendezvous {
 public:
  Rendezvous(KeyValueStore& store, GroupMemory& memory, LocalProcess& process, GroupRecord own,
             std::size_t arenaBytes);

  /// Announces this rank. Does not wait for anybody.
  void publish();
  /// For collectives: all ranks take part. The peers on this rank's host are then bound in
  /// `memory`.
  Agreement agree(TimePoint deadline, Milliseconds timeout);
  enum class Met { NotYet, Pairing, Here, Elsewhere };
  /// For point-to-point: only the two ranks take part. NotYet: the peer has not created the group.
  /// Pairing: it is on this host. Here: its block is bound, and it means this instance of the
  /// group. Elsewhere: on another host. Does not wait for the peer: ask again.
  Met tryMeet(int peer);
  /// For a peer elsewhere: tells it that this rank wants to connect, if `ask` or if the peer wants.
  /// Here: both do, under `name`. Pairing: its record has changed, ask tryMeet() again. Of one
  /// thread at a time.
  Met tryConnect(int peer, bool ask, std::string& name);
  /// Of a peer that tryConnect() has found: the key of its own fault, and whether its process is
  /// known to have ended. From any thread; asks no store.
  std::string faultKeyOf(int peer) const;
  bool hasEnded(int peer) const;
  /// Agreement::coreEach, once all ranks have created the group.
  std::optional<bool> coreEachIfKnown();
  /// Waits until all ranks have called it. Rank 0 throws Error(Timeout) naming the first rank that
  /// has not (all such ranks if `waitAllRanks`); the others then throw too. Over the store alone,
  /// so that it works before the ranks can talk to each other; the group stays usable.
  void monitoredBarrier(Milliseconds timeout, bool waitAllRanks);
  /// Keys under which a fault of this rank is told: of the ranks that agreed last, if they have, of
  /// this rank alone, and of ranks of this host that have died, for which ranks of other hosts may
  /// wait. From any thread.
  std::vector<std::string> faultKeys() const;
  /// The ranks whose processes are known to have ended in the group: "rank 1 (pid 4711, host h1)";
  /// "" if none is. Only for ranks that agreed.
  std::string endedProcesses() const;
  /// Ends a wait in another thread with an error.
  void cancel() { cancelled_.store(true, std::memory_order_release); }

  /// Thrown where this rank comes when the others have given up.
  struct CameLate : Error {
    using Error::Error;
  };

 private:
  /// Thrown when the group is lost, whatever the transport: no reason to vote for another one.
  struct GroupLost : Error {
    using Error::Error;
  };

  bool parse(int rank, const std::string& value, GroupRecord& record) const;
  void require(int rank, const GroupRecord& record) const;
  bool read(int rank, GroupRecord& record);
  Roster::Believes believes() const;
  std::vector<GroupRecord> gather(TimePoint deadline, Milliseconds timeout);
  void lookAtNext();
  void sayThatCame(TimePoint since, Milliseconds timeout);
  bool hasCome(const GroupRecord& record);
  std::string stateOf(const GroupRecord& record) const;
  [[noreturn]] void gatheredTooLate(Milliseconds timeout);
  std::vector<std::string> vote(const std::string& own, TimePoint deadline, Milliseconds timeout);
  bool changed();
  void requireToBeAlone();
  int processRuns(const GroupRecord& record) const;
  bool mayBeStale(const GroupRecord& record) const;
  bool processGone(const GroupRecord& record) const;
  [[noreturn]] void throwGone(const GroupRecord& record);
  void throwIfTold(const std::string& key);
  void throwIfGroupTold();
  void throwIfTold(const GroupRecord& by);
  std::string cameLate(const ToldFault& fault) const;
  std::shared_ptr<PeerProcess> answerOf(const GroupRecord& record) const;
  bool votedAgainst(const std::vector<int>& peers, std::string& why);
  std::string reasonOf(const std::string& vote) const;
  static std::string hostKey(const GroupRecord& record);
  static std::string nameOf(const GroupRecord& record);
  bool sharesHost(const GroupRecord& record) const;
  [[noreturn]] void throwDemanded(const GroupRecord& by, const std::string& reason) const;
  Hosts hostsOf(const std::vector<GroupRecord>& records, const std::string& apart) const;
  std::string whySeveral(const std::vector<GroupRecord>& records) const;
  bool coreEach(const std::vector<GroupRecord>& records) const;
  std::string bindAll(const std::vector<int>& peers, TimePoint deadline, bool& restart);
  static constexpr char kVotes[] = "v";  // the round
  // A record that did not change within this time is not stale: its owner really cannot be reached,
  // or torchrun counts its restarts otherwise.
  static constexpr Milliseconds kStaleGrace{2000};
  void throwIfCancelled() const;
  void pause(int& round) const;
  std::string missingOf(const std::vector<int>& peers);
  [[noreturn]] void timedOut(const std::string& missing, Milliseconds timeout) const;
  std::string prefix() const;

  KeyValueStore& store_;
  GroupMemory& memory_;
  LocalProcess& process_;
  GroupRecord own_;
  Roster roster_;
  std::atomic<std::int64_t> came_{0};  // to agree(): milliseconds since 1970
  const std::size_t arenaBytes_;
  const std::int64_t made_ = millisSince1970();
  int next_ = 0;  // the rank that lookAtNext() asks for
  bool saidThatCame_ = false;
  std::uint64_t monitored_ = 0;
  std::atomic<bool> cancelled_{false};
  mutable std::atomic<std::int64_t> doubted_{0};  // a record: since when, in nanoseconds since boot
  std::vector<GroupRecord> records_;
  mutable std::mutex keysMutex_;
  std::string groupFault_;          // its key, once the ranks' records are known
  Hosts hosts_;                     // once the ranks have agreed
  std::vector<GroupRecord> asked_;  // of the instances that were told: tryConnect's
  std::mutex seenMutex_;
  std::vector<GroupRecord> seen_;  // coreEachIfKnown's; without a magic: not yet
};

}  // namespace fastcoll
