// How two ranks meet for point-to-point, independent of the other ranks.
#include <cstdio>
#include <thread>

#include "base/settings.hpp"
#include "group/rendezvous.hpp"

namespace fastcoll {
namespace {

/// The name of a connection between two instances of a group; no other pair of ranks has it.
std::string pairName(std::uint64_t low, std::uint64_t high) {
  char digits[34];
  std::snprintf(digits, sizeof digits, "%016llx-%016llx", static_cast<unsigned long long>(low),
                static_cast<unsigned long long>(high));
  return digits;
}

}  // namespace

/// Whether the rank that wrote the record shares memory with this one.
bool Rendezvous::sharesHost(const GroupRecord& record) const {
  {
    const std::lock_guard<std::mutex> lock(keysMutex_);
    if (hosts_.size() > 0) return hosts_.hostOf(static_cast<int>(record.rank)) == hosts_.here();
  }
  return hostKey(record) == hostKey(own_);
}

/// Maps the block of a record's rank. False if its process does not answer within `patience`, or
/// has no such block.
bool Rendezvous::bind(const GroupRecord& record, Milliseconds patience) {
  const int peer = static_cast<int>(record.rank);
  if (memory_.isConfirmed(peer) && memory_.nonceOf(peer) != record.nonce) return false;
  // The echo shows the peer which instance this rank means, even before the peer can be mapped.
  memory_.own().link(peer).nonce.store(record.nonce, std::memory_order_release);
  for (const auto until = Clock::now() + patience;;) {
    auto process = process_.connect(record.process);
    if (process != nullptr) return memory_.bind(peer, std::move(process), record.nonce);
    if (Clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

Rendezvous::Met Rendezvous::tryMeet(int peer) {
  if (memory_.isConfirmed(peer)) return Met::Here;
  GroupRecord record{};
  if (!read(peer, record)) return Met::NotYet;
  memory_.nameMember(peer, processOf(record));
  if (!sharesHost(record)) {
    for (const GroupRecord& by : {own_, record}) {
      if (by.sharedMemory != SharedMemoryChoice::Require) continue;
      throwDemanded(by, whySeveral({own_, record}));
    }
    return Met::Elsewhere;
  }
  try {
    memory_.open(arenaBytes_);
  } catch (const Error& error) {
    throw Error(error.kind(), "it has no shared memory for point-to-point: ", error.what());
  }
  const bool bound = bind(record, Milliseconds(0));
  // Mutual: the peer must mean this instance too, not an earlier one under the same name.
  if (bound && memory_.isMutual(peer, record.nonce)) {
    memory_.confirm(peer, record.nonce);
    return Met::Here;
  }
  throwIfPublished(record);  // it may have failed, and so never means this instance
  if (!bound && processEnded(record)) throwEnded(record);
  return Met::Pairing;
}

Rendezvous::Met Rendezvous::tryConnect(int peer, bool ask, std::string& name) {
  GroupRecord record{};
  if (!read(peer, record)) return Met::NotYet;
  memory_.nameMember(peer, processOf(record));
  if (sharesHost(record)) return Met::Pairing;
  throwIfLost(record);
  const bool first = memory_.rank() < peer;
  name = pairName(first ? own_.nonce : record.nonce, first ? record.nonce : own_.nonce);
  const auto keyOf = [&name](int rank) { return concat("fastcoll/p/", name, "/", rank); };
  std::string there;
  const bool asked = store_.tryGet(keyOf(peer), there);
  if (!asked && !ask) return Met::NotYet;
  {
    const std::lock_guard<std::mutex> lock(keysMutex_);
    asked_.resize(memory_.size());
    GroupRecord& known = asked_[peer];
    ask = known.nonce != record.nonce;
    known = record;
  }
  if (ask) store_.set(keyOf(memory_.rank()), "here");
  return asked ? Met::Here : Met::NotYet;
}

void Rendezvous::throwIfLost(const GroupRecord& record) {
  throwIfGroupPublished();
  throwIfPublished(record);
  if (processEnded(record)) throwEnded(record);
}

GroupRecord Rendezvous::asked(int peer) const {
  const std::lock_guard<std::mutex> lock(keysMutex_);
  return asked_.at(peer);
}

std::optional<int> Rendezvous::coresEachIfKnown() {
  const std::lock_guard<std::mutex> lock(seenMutex_);
  seen_.resize(memory_.size());
  for (int rank = 0; rank < memory_.size(); ++rank) {
    GroupRecord& record = seen_[rank];
    GroupRecord now{};
    if (record.magic == 0 && !read(rank, now)) return std::nullopt;
    if (record.magic == 0) record = now;
  }
  return coresEach(seen_);
}

}  // namespace fastcoll
