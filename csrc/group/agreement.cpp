// How the ranks of a group agree on one transport: all records, then all votes.
#include <algorithm>
#include <cstring>
#include <thread>

#include "../base/settings.hpp"
#include "rendezvous.hpp"

namespace fastcoll {
namespace {

// A vote is kShared, or kAgainst followed by a reason.
constexpr char kShared[] = "shm";
constexpr char kAgainst[] = "gloo: ";
constexpr std::size_t kLongestReason = 500;

// A rank that waits this long for the roster posts that it has arrived.
constexpr Milliseconds kSayThatCame{100};

// Time for a running process to answer, before this rank checks what else may have happened.
constexpr Milliseconds kAnswer{2};

std::string cameKey(std::uint64_t nonce) {
  return concat("fastcoll/c/", nonce);
}

}  // namespace

/// Whether one of the ranks has voted against shared memory with the present records; `why` is its
/// reason.
bool Rendezvous::votedAgainst(const std::vector<int>& peers, std::string& why) {
  for (const int rank : peers) {
    std::string vote;
    if (rank == memory_.rank() || !roster_.said(kVotes, rank, vote) || vote == kShared) continue;
    why = reasonOf(vote);
    return true;
  }
  return false;
}

/// The reason in a vote against shared memory. Any process that reaches the store can write there.
std::string Rendezvous::reasonOf(const std::string& vote) const {
  const std::string head = kAgainst;
  if (vote.compare(0, head.size(), head) != 0) {
    throw Error(ErrorKind::Store, concat(prefix(),
                                         "the store holds an invalid entry of fastcoll: whether a "
                                         "rank can share memory",
                                         kOwnStore));
  }
  return vote.substr(head.size(), kLongestReason);
}

std::string Rendezvous::nameOf(const GroupRecord& record) {
  return concat("pid ", record.pid, ", host ",
                std::string(record.host, strnlen(record.host, sizeof record.host)));
}

void Rendezvous::throwDemanded(const GroupRecord& by, const std::string& reason) const {
  throw Error(
      ErrorKind::Backend,
      concat(prefix(),
             "shared memory was demanded (FASTCOLL_TRANSPORT=shm or Options.transport) by rank ",
             by.rank, ", but ", withoutFullStop(reason),
             ". Unset it on all ranks to let them use Gloo."));
}

// --- the ranks' records -------------------------------------------------------------------------

std::vector<GroupRecord> Rendezvous::gather(TimePoint deadline, Milliseconds timeout) {
  const auto began = Clock::now();
  int look = 0;
  const auto& values = roster_.gather(believes(), [&] {
    throwIfCancelled();
    if (Clock::now() >= deadline) gatheredTooLate(timeout);
    if (++look % 8 != 0) return;
    sayThatCame(began, timeout);
    requireToBeAlone();
    lookAtNext();
  });
  std::vector<GroupRecord> records(values.size());
  std::string missing;
  for (int rank = 0; rank < memory_.size(); ++rank) {
    const std::size_t i = rank;
    if (values[i].empty()) missing += concat(missing.empty() ? "" : ", ", rank);
    if (values[i].empty()) continue;
    (void)parse(rank, values[i], records[i]);  // rank 0 decides what is stale
    require(rank, records[i]);
  }
  if (missing.empty()) return records;
  throw Error(ErrorKind::Store, concat(prefix(), "rank 0 timed out before rank(s) ", missing,
                                       " had created the group. Read the error of rank 0."));
}

/// Posts that this rank has arrived, once it has waited a while. Ranks that time out then do not
/// report it as missing.
void Rendezvous::sayThatCame(TimePoint since, Milliseconds timeout) {
  if (saidThatCame_ || Clock::now() - since < std::min(kSayThatCame, timeout / 2)) return;
  store_.set(cameKey(own_.nonce), "");
  saidThatCame_ = true;
}

bool Rendezvous::hasCome(const GroupRecord& record) {
  return record.nonce == own_.nonce || store_.has(cameKey(record.nonce));
}

/// Timed out: names the ranks that have not created the group, or not arrived at its first
/// collective.
void Rendezvous::gatheredTooLate(Milliseconds timeout) {
  std::string without, late;
  for (int rank = 0; rank < memory_.size(); ++rank) {
    GroupRecord record{};
    if (!read(rank, record)) {
      without += concat(without.empty() ? "" : ", ", rank);
    } else if (!hasCome(record)) {
      late += concat(late.empty() ? "" : "; ", "rank ", rank, " (", nameOf(record), stateOf(record),
                     ") has not arrived at the group's first collective");
    }
  }
  if (!without.empty())
    timedOut(concat("rank(s) ", without, " have not created the group"), timeout);
  timedOut(late.empty() ? "rank 0 has not gathered the ranks' records" : late, timeout);
}

// --- the ranks of this host ---------------------------------------------------------------------

/// For a rank's process: ", state T" if it is stopped.
std::string Rendezvous::stateOf(const GroupRecord& record) const {
  const int pid = static_cast<int>(record.pid);
  return concat(", state ", processRuns(record) == 1 ? processState(pid) : '?');
}

/// The process of a record's rank. A running process answers within some microseconds.
std::shared_ptr<PeerProcess> Rendezvous::answerOf(const GroupRecord& record) const {
  for (const auto until = Clock::now() + kAnswer;;) {
    auto process = process_.connect(record.process);
    if (process != nullptr || Clock::now() >= until) return process;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

/// Timed out: the ranks that cannot be bound, with their reasons.
std::string Rendezvous::missingOf(const std::vector<int>& peers) {
  std::string missing;
  for (const int peer : peers) {
    const auto& record = records_[peer];
    auto process = answerOf(record);
    if (process != nullptr && memory_.bind(peer, std::move(process), record.nonce)) continue;
    std::string vote;
    const bool voted = roster_.said(kVotes, peer, vote);
    missing += concat(missing.empty() ? "" : "; ", "rank ", peer, " (", nameOf(record),
                      stateOf(record), ") ",
                      voted ? "cannot be reached over its unix socket"
                            : "has not arrived at the group's first collective");
  }
  return missing;
}

// Returns "" when all peers are bound, else why one cannot be; restart: a record turned out stale.
std::string Rendezvous::bindAll(const std::vector<int>& peers, TimePoint deadline, bool& restart) {
  for (const int peer : peers) {
    const auto& record = records_[peer];
    const auto began = Clock::now();
    const auto patience = std::min(deadline, began + kStaleGrace);
    for (int round = 0;;) {
      auto process = answerOf(record);
      if (process != nullptr && memory_.bind(peer, std::move(process), record.nonce)) break;
      GroupRecord now{};
      if (read(peer, now) && now.nonce != record.nonce) {
        restart = true;
        return "";
      }
      // Wait for a peer until the deadline: it may not have used the group yet. Its unchanged
      // record is no error, because it may still be replaced. Any member's death ends the wait, not
      // only that of the peer: the other ranks may have detected it and left.
      for (const auto& member : records_) {
        if (!processGone(member)) continue;
        if (read(static_cast<int>(member.rank), now) && now.nonce != member.nonce) {
          restart = true;
          return "";
        }
        throwGone(member);
      }
      // A peer that cannot share memory has voted already, and will never listen. A peer that
      // failed has written its fault.
      if (std::string against; round % 8 == 7 && votedAgainst(peers, against)) return against;
      if (round % 8 == 7) {
        throwIfTold(faultKey(roster_.id()));
        lookAtNext();  // one may have failed before it had the roster
        sayThatCame(began, kStaleGrace);
      }
      if (Clock::now() >= deadline) return missingOf(peers);
      if (round > 20 && Clock::now() >= patience && changed()) {
        restart = true;
        return "";
      }
      throwIfCancelled();
      pause(round);
    }
  }
  return "";
}

// --- the decision -------------------------------------------------------------------------------

/// The votes of all ranks; empty if the records have changed.
std::vector<std::string> Rendezvous::vote(const std::string& own, TimePoint deadline,
                                          Milliseconds timeout) {
  int look = 0;
  bool restart = false;
  const auto onLook = [&] {
    throwIfCancelled();
    if (Clock::now() >= deadline) {
      std::string missing, undecided;
      for (const int rank : roster_.silent(kVotes)) {  // some may wait for ranks of their hosts
        auto& list = hasCome(records_[rank]) ? undecided : missing;
        list += concat(list.empty() ? "" : ", ", rank);
      }
      timedOut(
          missing.empty()
              ? concat("rank(s) ", undecided, " have not reported whether they can share memory")
              : concat("rank(s) ", missing, " have not arrived at the group's first collective"),
          timeout);
    }
    if (++look % 8 != 0) return;
    restart = changed();
    if (restart) return;
    throwIfTold(faultKey(roster_.id()));
    lookAtNext();  // one may have failed before it had the roster
    for (const auto& record : records_) {
      GroupRecord now{};
      if (!processGone(record) || !read(static_cast<int>(record.rank), now)) continue;
      if (now.nonce == record.nonce) throwGone(record);
    }
  };
  auto votes = roster_.exchange(kVotes, own, onLook, [&] { return restart; });
  if (!votes) return {};
  if (own != kShared && (*votes)[memory_.rank()] == kShared) {
    throw Error(ErrorKind::Store,
                concat(prefix(), "the store has the entry that all ranks share memory, but ",
                       withoutFullStop(reasonOf(own)), kOwnStore));
  }
  return *votes;
}

Agreement Rendezvous::agree(TimePoint deadline, Milliseconds timeout) {
  came_ = millisSince1970();
  for (;;) {
    records_ = gather(deadline, timeout);
    Agreement agreement;
    agreement.id = roster_.id();
    agreement.coreEach = coreEach(records_);
    {
      std::lock_guard<std::mutex> lock(keysMutex_);
      groupFault_ = faultKey(agreement.id);
    }
    const Hosts hosts = hostsOf(records_, "");
    const std::vector<int>& local = hosts.local();
    for (const auto& record : records_) {
      memory_.nameMember(static_cast<int>(record.rank), nameOf(record));
    }
    std::string problem;
    if (local.size() > 1) {
      try {
        memory_.open(arenaBytes_);
        bool restart = false;
        problem = bindAll(local, deadline, restart);
        if (restart) continue;
        if (!problem.empty() && Clock::now() >= deadline) timedOut(problem, timeout);
      } catch (const GroupLost&) {
        throw;
      } catch (const Error& error) {
        if (error.kind() == ErrorKind::Store || error.kind() == ErrorKind::Timeout) throw;
        problem = concat("rank ", memory_.rank(), ": ", error.what());
      }
    }
    const auto votes = vote(problem.empty() ? kShared : kAgainst + problem, deadline, timeout);
    if (votes.empty()) continue;

    // The results below are equal on all ranks, because all their inputs are.
    std::string apart(hosts.count(), '0');
    for (std::size_t rank = 0; rank < votes.size(); ++rank) {
      if (votes[rank] == kShared) continue;
      apart[hosts.hostOf(static_cast<int>(rank))] = '1';
      if (agreement.reason.empty()) agreement.reason = reasonOf(votes[rank]);
    }
    agreement.hosts = hostsOf(records_, apart);
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
      if (record.transport != static_cast<std::uint32_t>(TransportChoice::Shm)) continue;
      throwDemanded(record, agreement.reason);
    }
    return agreement;
  }
}

}  // namespace fastcoll
