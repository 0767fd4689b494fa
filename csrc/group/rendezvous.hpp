// How the ranks of a group find each other and agree on one transport.
//
// Store values may be stale: torchrun reuses its store after a restart, and a process may recreate
// a group under the same prefix. So every rank's record holds a fresh nonce. A vote counts only for
// exactly the set of nonces that all ranks see:
//
//   r/<rank>, roster the ranks' records; see roster.hpp
//   <H>/v            whether each rank shares memory with those of its host: "shm", or why not;
//                    from all votes every rank derives which hosts' ranks stay apart
//   c/<nonce>        the rank has arrived at the first collective, and waits
//   p/<pair>/<rank>  the rank wants to connect with the other of the pair, for point-to-point
//   f/<H>            the fault of a rank; see faults.hpp
//
// H, the roster's id, is equal on all ranks that accept one roster. A rank that sees another roster
// starts over with the new H. A key that names H cannot be stale: H is a hash of all records, and
// so of the reader's own fresh nonce.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.hpp"
#include "base/cores.hpp"
#include "base/error.hpp"
#include "base/settings.hpp"
#include "base/store.hpp"
#include "group/faults.hpp"
#include "group/hosts.hpp"
#include "group/roster.hpp"
#include "shm/group_memory.hpp"

namespace fastcoll {

/// A rank's description of itself. Fixed size; checked for length, magic and version before use.
struct GroupRecord {
  std::uint64_t magic;
  std::uint32_t abi;
  std::uint32_t bytesOfThis;
  std::uint64_t nonce;       // of this instance of the group
  std::uint64_t generation;  // of torchrun's restarts: a record of another one may be stale
  ProcessAddress process;
  std::uint64_t networkNamespace;
  std::uint64_t pidNamespace;
  std::uint64_t processStart;  // identifies the process, with the pid
  std::uint64_t processBegan;  // the same in nanoseconds since boot
  std::uint64_t createdAt;     // when the group was created, in nanoseconds since boot
  std::uint32_t rank;
  std::uint32_t size;
  std::uint32_t uid;
  std::uint32_t pid;
  std::uint64_t ringBytes;
  std::uint64_t tuning;  // TuningTable::fingerprint
  SharedMemoryChoice sharedMemory;
  std::uint32_t madeBefore;  // how many groups of this name and rank the process has made before
  CoreSet cores;             // of the thread that created the group
  CoreSet cache;             // coresOfCache() of these
  char bootId[40];
  char hostId[64];  // FASTCOLL_HOST_ID, or ""
  char host[64];
  char network[16];
  char version[32];
};

/// Counts the groups that this process makes, by name and rank. Returns how many it has made
/// before.
std::uint32_t countGroup(const std::string& name, int rank);

/// Hash of torchrun's run id and restart count, 0 outside torchrun.
std::uint64_t restartGeneration();

struct Agreement {
  Hosts hosts;
  std::string reason;       // why there is more than one host
  std::string id;           // H, for keys that must be fresh
  int coresEach = 0;        // with one, this rank may spin while it waits for the others
  bool sharedCache = true;  // the cores of this host's ranks share one, as far as is known
};

class Rendezvous {
 public:
  Rendezvous(KeyValueStore& store, GroupMemory& memory, LocalProcess& process, GroupRecord own,
             std::size_t arenaBytes);

  /// Publishes this rank's record. Does not wait.
  void publish();
  /// For collectives: all ranks take part. Afterwards the peers on this rank's host are bound in
  /// `memory`.
  Agreement agree(TimePoint deadline, Milliseconds timeout);
  enum class Met { NotYet, Pairing, Here, Elsewhere };
  /// For point-to-point: only the two ranks take part. NotYet: the peer has not created the group.
  /// Pairing: it is on this host. Here: its block is bound, and it means this instance of the
  /// group. Elsewhere: on another host. Does not wait for the peer: call again.
  Met tryMeet(int peer);
  /// For a peer elsewhere: posts that this rank wants to connect, if `ask` or if the peer wants to.
  /// Here: both do, under `name`. Pairing: the peer is on this host by now, call tryMeet() again.
  /// Call from one thread at a time.
  Met tryConnect(int peer, bool ask, std::string& name);
  /// For a peer that tryConnect() has found: throws if it or the group has failed. From any thread.
  void throwIfLost(int peer) { throwIfLost(asked(peer)); }
  /// For such a peer: the key of its own fault, and whether its process is known to have ended.
  /// From any thread; does not read the store.
  std::string faultKeyOf(int peer) const { return faultKey(asked(peer).nonce); }
  bool hasEnded(int peer) const { return processEnded(asked(peer)); }
  /// Agreement::coresEach, once all ranks have created the group.
  std::optional<int> coresEachIfKnown();
  /// Waits until all ranks have called it. Rank 0 throws Error(Timeout) naming the first rank that
  /// has not (all such ranks if `waitAllRanks`); the others then throw too. Uses only the store, so
  /// it works before the ranks are connected. The group stays usable.
  void monitoredBarrier(Milliseconds timeout, bool waitAllRanks);
  /// Keys under which this rank writes a fault, from any thread: that of the ranks that agreed
  /// last, if they have; that of this rank; and those of dead ranks of this host, for which ranks
  /// of other hosts may wait.
  std::vector<std::string> faultKeys() const;
  /// The ranks whose processes have ended without leaving the group: "rank 1 (pid 4711, host h1)";
  /// "" if there is none. Only for ranks that agreed.
  std::string endedProcesses() const;
  /// Ends a wait in another thread with an error.
  void cancel() { cancelled_.store(true, std::memory_order_release); }

  /// Thrown if this rank arrives after the others have timed out.
  struct CameLate : Error {
    using Error::Error;
  };
  /// Thrown if the group is lost with any transport, so this rank does not vote for another one: a
  /// rank has published its fault, or has ended.
  struct GroupLost : Error {
    using Error::Error;
  };

 private:
  bool parse(int rank, const std::string& value, GroupRecord& record) const;
  void require(int rank, const GroupRecord& record) const;
  bool read(int rank, GroupRecord& record);
  Roster::IsCurrent isCurrent() const;
  std::vector<GroupRecord> gather(TimePoint deadline, Milliseconds timeout);
  void checkNextRank();
  void postArrival(TimePoint since, Milliseconds timeout);
  bool hasPostedArrival(const GroupRecord& record);
  std::string stateOf(const GroupRecord& record) const;
  [[noreturn]] void throwNotGathered(Milliseconds timeout);
  std::vector<std::string> vote(const std::string& own, TimePoint deadline, Milliseconds timeout);
  bool membersChanged();
  void requireToBeAlone();
  int processRuns(const GroupRecord& record) const;
  bool mayBeStale(const GroupRecord& record) const;
  bool processEnded(const GroupRecord& record) const;
  GroupRecord asked(int peer) const;
  [[noreturn]] void throwEnded(const GroupRecord& record);
  void throwIfGroupPublished();
  void throwIfLost(const GroupRecord& record);
  void throwIfPublished(const GroupRecord& by);
  [[noreturn]] void throwFault(const Fault& fault) const;
  std::string lateCause(const Fault& fault) const;
  bool bind(const GroupRecord& record, Milliseconds patience);
  bool votedAgainst(const std::vector<int>& peers, std::string& why);
  std::string reasonOf(const std::string& vote) const;
  static std::string hostKey(const GroupRecord& record);
  /// "pid 4711, host h1"
  static std::string processOf(const GroupRecord& record);
  /// "rank 1 (pid 4711, host h1, state T)", with that `state`.
  static std::string nameOf(const GroupRecord& record, const std::string& state = "");
  bool sharesHost(const GroupRecord& record) const;
  [[noreturn]] void throwDemanded(const GroupRecord& by, const std::string& reason) const;
  Hosts hostsOf(const std::vector<GroupRecord>& records, const std::string& apart) const;
  std::string whySeveral(const std::vector<GroupRecord>& records) const;
  int coresEach(const std::vector<GroupRecord>& records) const;
  bool sharedCache(const std::vector<int>& ranks) const;
  std::optional<std::string> bindAll(const std::vector<int>& peers, TimePoint deadline,
                                     Milliseconds timeout);
  static constexpr char kVotes[] = "v";  // the round
  // A record that has not changed within this time is not stale: torchrun's restart counts differ.
  static constexpr Milliseconds kStaleGrace{2000};
  void throwIfCancelled() const;
  std::string missingOf(const std::vector<int>& peers);
  [[noreturn]] void timedOut(const std::string& missing, Milliseconds timeout) const;
  ErrorSite site() const;

  KeyValueStore& store_;
  GroupMemory& memory_;
  LocalProcess& process_;
  GroupRecord own_;
  const std::unordered_map<int, std::uint64_t>& ranBefore_;  // see processesAtFirstCall()
  Roster roster_;
  Roster barriers_;                         // the monitored barriers' rounds
  std::atomic<std::int64_t> arrivedAt_{0};  // when agree() was called: milliseconds since 1970
  const std::size_t arenaBytes_;
  const std::int64_t made_ = millisSince1970();
  int next_ = 0;  // the rank that checkNextRank() checked last
  bool arrivalPosted_ = false;
  std::timed_mutex barrierMutex_;  // held by a monitored barrier, so one runs at a time
  std::uint64_t barrier_ = 0;      // the round of the last call
  std::uint64_t barrierKept_ = 1;  // the first round whose keys this rank has not deleted
  std::atomic<bool> cancelled_{false};
  mutable std::atomic<std::int64_t> doubted_{0};  // first doubt of a record: ns since boot
  std::vector<GroupRecord> records_;
  mutable std::mutex keysMutex_;
  std::string groupFault_;          // its key, once the ranks' records are known
  Hosts hosts_;                     // once the ranks have agreed
  std::vector<GroupRecord> asked_;  // tryConnect(): of the peers that it has posted to
  std::mutex seenMutex_;
  std::vector<GroupRecord> seen_;  // coresEachIfKnown(): read so far; magic 0: not yet
  std::set<std::uint64_t> sound_;  // nonces of records that were once read without a fault
};

}  // namespace fastcoll
