// How the ranks of a group agree on one transport: votes, and rank 0's decision.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "../base/env.hpp"
#include "../base/hash.hpp"
#include "rendezvous.hpp"

namespace fastcoll {
namespace {

// Votes and decisions: this, or the other with a reason behind it.
constexpr char kShared[] = "shm";
constexpr char kAgainst[] = "gloo: ";
constexpr char kApart[] = "apart ";  // and '0' or '1' for each host, and ": "
constexpr std::size_t kLongestReason = 500;

// Open files that Gloo takes beside one for each connection: it listens, polls, and asks the store.
constexpr int kGlooDescriptors = 6;

}  // namespace

std::string Rendezvous::hash() const {
  std::uint64_t h = kFnvBasis;
  for (const auto& record : records_) h = fnv(&record.nonce, sizeof record.nonce, h);
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(h));
  return digits;
}

std::string Rendezvous::voteKey(int rank) const {
  return concat("fastcoll/v/", hash(), "/", rank);
}

/// One of the ranks has voted against shared memory with the present records; `why` is its reason.
bool Rendezvous::votedAgainst(const std::vector<int>& peers, std::string& why) {
  for (const int rank : peers) {
    std::string vote;
    if (rank == memory_.rank() || !store_.tryGet(voteKey(rank), vote) || vote == kShared) continue;
    why = reasonOf(vote, kAgainst);
    return true;
  }
  return false;
}

/// The reason in a vote or a decision against shared memory, behind its head. Anybody who reaches
/// the store can write there.
std::string Rendezvous::reasonOf(const std::string& vote, const std::string& head) const {
  if (vote.compare(0, head.size(), head) != 0) {
    throw Error(ErrorKind::Store,
                concat(prefix(), "what the store holds as a vote is none of fastcoll's"));
  }
  return vote.substr(head.size(), kLongestReason);
}

/// Before this rank votes for Gloo, which ends the process, or leaves the others waiting for this
/// rank, where descriptors run out.
void Rendezvous::requireDescriptors(int connections) const {
  const int wanted = connections + kGlooDescriptors;
  std::vector<int> held;
  held.reserve(static_cast<std::size_t>(wanted));
  int error = 0;
  while (error == 0 && static_cast<int>(held.size()) < wanted) {
    const int fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    fd < 0 ? error = errno : (held.push_back(fd), 0);
  }
  for (const int fd : held) ::close(fd);
  if (error == 0) return;
  throw GroupLost(
      ErrorKind::Backend,
      concat(prefix(), memory_.memberName(memory_.rank()), " can open ", held.size(),
             " more files where Gloo, for ", connections, " connections, needs ", wanted, " (",
             std::strerror(error), "). Raise the limit on open files (ulimit -n) on that rank."));
}

std::string Rendezvous::nameOf(const GroupRecord& record) {
  return concat("pid ", record.pid, ", host ",
                std::string(record.host, strnlen(record.host, sizeof record.host)));
}

void Rendezvous::throwDemanded(const GroupRecord& by, const std::string& reason) const {
  throw Error(ErrorKind::Backend,
              concat(prefix(), "shared memory was demanded (FASTCOLL_TRANSPORT=shm) by rank ",
                     by.rank, ", but ", reason, ". Unset it on all ranks to let them use Gloo."));
}

Agreement Rendezvous::agree(TimePoint deadline, Milliseconds timeout) {
  came_ = millisSince1970();
  for (;;) {
    records_ = readAll(deadline, timeout);
    Agreement agreement;
    agreement.id = hash();
    agreement.coreEach = coreEach(records_);
    {
      std::lock_guard<std::mutex> lock(keysMutex_);
      groupFault_ = faultKey(agreement.id);
    }
    // Equal on all ranks, as every input of the decision must be.
    const auto demanding =
        std::find_if(records_.begin(), records_.end(), [](const GroupRecord& record) {
          return record.transport == static_cast<std::uint32_t>(TransportChoice::Shm);
        });
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
    if (!problem.empty() || hosts.count() > 1) {
      requireDescriptors(memory_.size() - 1);
    }
    const std::string decision = concat("fastcoll/go/", agreement.id);
    const std::string vote = problem.empty() ? kShared : kAgainst + problem;
    store_.set(voteKey(memory_.rank()), vote);

    bool restart = false;
    std::string result;
    std::vector<bool> have(records_.size(), false);
    std::string apart(static_cast<std::size_t>(hosts.count()), '0'), reason;
    for (int round = 0; result.empty() && !restart;) {
      if (memory_.rank() == 0) {
        bool all = true;
        for (std::size_t i = 0; i < have.size(); ++i) {
          std::string value;
          if (!have[i] && store_.tryGet(voteKey(static_cast<int>(i)), value)) {
            have[i] = true;
            const std::string why = value == kShared ? "" : reasonOf(value, kAgainst);
            if (value != kShared) {
              apart[static_cast<std::size_t>(hosts.hostOf(static_cast<int>(i)))] = '1';
            }
            if (reason.empty()) reason = why;
          }
          all = all && have[i];
        }
        if (all) {
          const bool none = apart.find('1') == std::string::npos;
          result = none ? kShared : kApart + apart + ": " + reason;
          store_.set(decision, result);
          break;
        }
      } else if (store_.tryGet(decision, result)) {
        break;
      }
      if (Clock::now() >= deadline) {
        std::string missing;
        for (std::size_t i = 0; i < have.size() && memory_.rank() == 0; ++i) {
          if (!have[i]) missing += concat(missing.empty() ? "" : ", ", i);
        }
        timedOut(
            memory_.rank() == 0
                ? concat("rank(s) ", missing, " have not arrived at the group's first collective")
                : "the ranks have not all arrived at the group's first collective",
            timeout);
      }
      pause(round);
      if (round % 8 != 0) continue;
      throwIfTold(faultKey(agreement.id));
      restart = changed();
      for (const auto& record : records_) {
        if (!restart && processGone(record)) throwGone(record);
      }
    }
    if (restart) continue;
    if (result != kShared) {
      const std::size_t head = sizeof kApart - 1;
      const std::string digits =
          result.size() > head + apart.size() ? result.substr(head, apart.size()) : apart;
      agreement.reason = reasonOf(result, kApart + digits + ": ");
      apart = digits;
      if (apart.find_first_not_of("01") != std::string::npos) (void)reasonOf("", kApart);
    }
    const bool stay = apart[static_cast<std::size_t>(hosts.here())] == '1';
    if (!stay && !problem.empty()) {
      throw Error(ErrorKind::Store,
                  concat(prefix(), "the store says that all ranks share memory, but ", problem,
                         ". Give each job a store, or a prefix, of its own."));
    }
    agreement.hosts = hostsOf(records_, apart);
    for (const int peer : agreement.hosts.local()) {
      if (agreement.hosts.local().size() == 1) break;
      memory_.confirm(peer, records_[static_cast<std::size_t>(peer)].nonce);
    }
    {
      const std::lock_guard<std::mutex> lock(keysMutex_);
      hosts_ = agreement.hosts;
    }
    if (agreement.reason.empty()) agreement.reason = whySeveral(records_);
    if (agreement.hosts.count() == 1) agreement.reason = "all ranks share one host and user";
    if (agreement.hosts.count() > 1 && demanding != records_.end()) {
      throwDemanded(*demanding, agreement.reason);
    }
    return agreement;
  }
}

}  // namespace fastcoll
