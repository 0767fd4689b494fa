// How the ranks of a group agree on one transport: all records, then all votes.
#include <algorithm>

#include "base/settings.hpp"
#include "group/rendezvous.hpp"

namespace fastcoll {
namespace {

// A vote is kShared, or kAgainst followed by a reason.
constexpr char kShared[] = "shm";
constexpr char kAgainst[] = "apart: ";
constexpr std::size_t kLongestReason = 500;

// A rank that waits this long for the roster posts that it has arrived.
constexpr Milliseconds kArrivalAfter{100};

// Time for a running process to answer, before this rank checks what else may have happened.
constexpr Milliseconds kAnswer{2};

constexpr char kNotArrived[] = " has not arrived at the group's first collective";

std::string arrivalKey(std::uint64_t nonce) {
  return concat("fastcoll/c/", nonce);
}

}  // namespace

/// Whether one of the ranks has voted against shared memory with the present records; `why` is its
/// reason.
bool Rendezvous::votedAgainst(const std::vector<int>& peers, std::string& why) {
  for (const int rank : peers) {
    std::string vote;
    if (rank == memory_.rank() || !roster_.get(kVotes, rank, vote) || vote == kShared) continue;
    why = reasonOf(vote);
    return true;
  }
  return false;
}

/// The reason in a vote against shared memory. Any process that reaches the store can write there.
std::string Rendezvous::reasonOf(const std::string& vote) const {
  const std::string head = kAgainst;
  if (vote.compare(0, head.size(), head) != 0) {
    throw Error(ErrorKind::Store, site(),
                "the store holds an invalid entry of fastcoll: whether a "
                "rank can share memory",
                kOwnStore);
  }
  return vote.substr(head.size(), kLongestReason);
}

void Rendezvous::throwDemanded(const GroupRecord& by, const std::string& reason) const {
  throw Error(
      ErrorKind::Backend, site(),
      "shared memory is required (FASTCOLL_SHARED_MEMORY or Options.shared_memory) by rank ",
      by.rank, ", but ", withoutFullStop(reason),
      ". Unset it on all ranks to let them use the network.");
}

// --- the ranks' records -------------------------------------------------------------------------

std::vector<GroupRecord> Rendezvous::gather(TimePoint deadline, Milliseconds timeout) {
  const auto began = Clock::now();
  int polls = 0;
  const auto& values = roster_.gather(isCurrent(), [&] {
    throwIfCancelled();
    if (Clock::now() >= deadline) throwNotGathered(timeout);
    if (++polls % 8 != 0) return;
    postArrival(began, timeout);
    requireToBeAlone();
    checkNextRank();
  });
  std::vector<GroupRecord> records(values.size());
  std::vector<int> missing;
  for (int rank = 0; rank < memory_.size(); ++rank) {
    const std::size_t i = rank;
    if (values[i].empty()) missing.push_back(rank);
    if (values[i].empty()) continue;
    (void)parse(rank, values[i], records[i]);  // rank 0 decides what is stale
    require(rank, records[i]);
  }
  if (missing.empty()) return records;
  throw Error(ErrorKind::Store, site(), "rank 0 timed out before rank(s) ", listOf(missing),
              " had created the group. Read the error of rank 0.");
}

/// Posts that this rank has arrived, once it has waited a while. Ranks that time out then do not
/// report it as missing.
void Rendezvous::postArrival(TimePoint since, Milliseconds timeout) {
  if (arrivalPosted_ || Clock::now() - since < std::min(kArrivalAfter, timeout / 2)) return;
  store_.set(arrivalKey(own_.nonce), "");
  arrivalPosted_ = true;
}

bool Rendezvous::hasPostedArrival(const GroupRecord& record) {
  return record.nonce == own_.nonce || store_.has(arrivalKey(record.nonce));
}

/// Timed out: names the ranks that have not created the group, or not arrived at its first
/// collective.
void Rendezvous::throwNotGathered(Milliseconds timeout) {
  std::vector<int> without;
  std::vector<std::string> late;
  for (int rank = 0; rank < memory_.size(); ++rank) {
    GroupRecord record{};
    if (!read(rank, record)) {
      without.push_back(rank);
    } else if (!hasPostedArrival(record)) {
      late.push_back(nameOf(record, stateOf(record)) + kNotArrived);
    }
  }
  if (!without.empty()) {
    timedOut(concat("rank(s) ", listOf(without), " have not created the group"), timeout);
  }
  timedOut(late.empty() ? "rank 0 has not gathered the ranks' records"
                        : listOf(late, std::identity(), "; "),
           timeout);
}

// --- the ranks of this host ---------------------------------------------------------------------

/// For a rank's process: ", state T" if it is stopped.
std::string Rendezvous::stateOf(const GroupRecord& record) const {
  const int pid = static_cast<int>(record.pid);
  return concat(", state ", processRuns(record) == 1 ? processState(pid) : '?');
}

/// Timed out: the ranks that cannot be bound, with their reasons.
std::string Rendezvous::missingOf(const std::vector<int>& peers) {
  const auto missing = [this](int peer) -> std::string {
    const GroupRecord& record = records_[peer];
    if (bind(record, kAnswer)) return "";
    std::string vote;
    const bool voted = roster_.get(kVotes, peer, vote);
    return nameOf(record, stateOf(record)) +
           (voted ? " cannot be reached over its unix socket" : kNotArrived);
  };
  return listOf(peers, missing, "; ");
}

/// Binds the blocks of all peers. Returns "", or why one cannot be bound; nullopt if the records
/// have changed. Waits until the deadline for a peer that has not used the group yet.
std::optional<std::string> Rendezvous::bindAll(const std::vector<int>& peers, TimePoint deadline,
                                               Milliseconds timeout) {
  const auto began = Clock::now();
  for (const int peer : peers) {
    for (int polls = 0; !bind(records_[peer], kAnswer); pause(polls)) {
      throwIfCancelled();
      if (Clock::now() >= deadline) return missingOf(peers);
      if (polls % 8 != 7) continue;
      postArrival(began, timeout);
      // A peer that cannot share memory has voted already, and will never listen.
      if (std::string against; votedAgainst(peers, against)) return against;
      if (membersChanged()) return std::nullopt;
    }
  }
  return "";
}

// --- the decision -------------------------------------------------------------------------------

/// Whether rank 0 has, or will have, gathered other records. Throws if a rank has failed or ended,
/// also one that this rank need not meet: the others may have detected that and left.
bool Rendezvous::membersChanged() {
  requireToBeAlone();
  if (roster_.changed(isCurrent())) return true;
  throwIfGroupPublished();
  checkNextRank();  // one may have failed before it had the roster
  for (const auto& record : records_) {
    GroupRecord now{};
    if (!processEnded(record) || !read(static_cast<int>(record.rank), now)) continue;
    if (now.nonce == record.nonce) throwEnded(record);
  }
  return false;
}

/// The votes of all ranks; empty if the records have changed.
std::vector<std::string> Rendezvous::vote(const std::string& own, TimePoint deadline,
                                          Milliseconds timeout) {
  int polls = 0;
  bool restart = false;
  const auto onPoll = [&] {
    throwIfCancelled();
    if (Clock::now() >= deadline) {
      std::vector<int> missing, undecided;
      for (const int rank : roster_.missing(kVotes)) {  // some may wait for ranks of their hosts
        (hasPostedArrival(records_[rank]) ? undecided : missing).push_back(rank);
      }
      timedOut(concat("rank(s) ", listOf(missing.empty() ? undecided : missing), " have not ",
                      missing.empty() ? "reported whether they can share memory"
                                      : "arrived at the group's first collective"),
               timeout);
    }
    if (++polls % 8 == 0) restart = membersChanged();
  };
  auto votes = roster_.exchange(kVotes, own, onPoll, [&] { return restart; });
  if (!votes) return {};
  if (own != kShared && (*votes)[memory_.rank()] == kShared) {
    throw Error(ErrorKind::Store, site(),
                "the store has the entry that all ranks share memory, but ",
                withoutFullStop(reasonOf(own)), kOwnStore);
  }
  return *votes;
}

Agreement Rendezvous::agree(TimePoint deadline, Milliseconds timeout) {
  arrivedAt_ = millisSince1970();
  for (;;) {
    records_ = gather(deadline, timeout);
    Agreement agreement;
    agreement.id = roster_.id();
    agreement.coresEach = coresEach(records_);
    {
      std::lock_guard<std::mutex> lock(keysMutex_);
      groupFault_ = faultKey(agreement.id);
    }
    const Hosts hosts = hostsOf(records_, "");
    const std::vector<int>& local = hosts.local();
    for (const auto& record : records_) {
      memory_.nameMember(static_cast<int>(record.rank), processOf(record));
    }
    std::optional<std::string> problem = "";
    if (local.size() > 1) {
      try {
        memory_.open(arenaBytes_);
        problem = bindAll(local, deadline, timeout);
        if (!problem) continue;
        if (!problem->empty() && Clock::now() >= deadline) timedOut(*problem, timeout);
      } catch (const GroupLost&) {
        throw;
      } catch (const Error& error) {
        if (error.kind() == ErrorKind::Store || error.kind() == ErrorKind::Timeout) throw;
        problem = concat("rank ", memory_.rank(), ": ", error.what());
      }
    }
    const auto votes = vote(problem->empty() ? kShared : kAgainst + *problem, deadline, timeout);
    if (votes.empty()) continue;

    // The results below are equal on all ranks, because all their inputs are.
    std::string apart(hosts.count(), '0');
    for (std::size_t rank = 0; rank < votes.size(); ++rank) {
      if (votes[rank] == kShared) continue;
      apart[hosts.hostOf(static_cast<int>(rank))] = '1';
      if (agreement.reason.empty()) agreement.reason = reasonOf(votes[rank]);
    }
    agreement.hosts = hostsOf(records_, apart);
    agreement.sharedCache = sharedCache(agreement.hosts.local());
    for (const int peer : agreement.hosts.local()) {
      if (agreement.hosts.local().size() == 1) break;
      memory_.confirm(peer, records_[peer].nonce);
    }
    {
      const std::lock_guard<std::mutex> lock(keysMutex_);
      hosts_ = agreement.hosts;
    }
    if (agreement.reason.empty()) agreement.reason = whySeveral(records_);
    if (agreement.hosts.count() == 1) {
      agreement.reason = "all ranks share one host and user";
      return agreement;
    }
    for (const auto& record : records_) {
      if (record.sharedMemory != SharedMemoryChoice::Require) continue;
      throwDemanded(record, agreement.reason);
    }
    return agreement;
  }
}

}  // namespace fastcoll
