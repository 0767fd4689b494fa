#include "group/rendezvous.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "base/hash.hpp"
#include "base/interrupt.hpp"
#include "base/weak_registry.hpp"

namespace fastcoll {
namespace {

/// A text field of a record. A record from the store may lack the final NUL.
template <std::size_t N>
std::string text(const char (&field)[N]) {
  return std::string(field, strnlen(field, N));
}

// Whether this process has found records of another generation that were not stale.
std::atomic<bool> countsDiffer{false};

}  // namespace

std::uint32_t countGroup(const std::string& name, int rank) {
  struct Counts {
    std::mutex mutex;
    std::map<std::pair<std::string, int>, std::uint32_t> made;
  };
  auto& here = perProcess<Counts>();
  const std::lock_guard<std::mutex> lock(here.mutex);
  return here.made[{name, rank}]++;
}

std::uint64_t restartGeneration() {
  const char* run = std::getenv("TORCHELASTIC_RUN_ID");
  const char* count = std::getenv("TORCHELASTIC_RESTART_COUNT");
  if (run == nullptr || count == nullptr) return 0;
  const std::string both = concat(run, "\n", count);
  return fnv(both.data(), both.size());
}

Rendezvous::Rendezvous(KeyValueStore& store, GroupMemory& memory, LocalProcess& process,
                       GroupRecord own, std::size_t arenaBytes)
    : store_(store),
      memory_(memory),
      process_(process),
      own_(own),
      ranBefore_(processesAtFirstCall()),
      roster_(store, "fastcoll", memory.rank(), memory.size(),
              std::string(reinterpret_cast<const char*>(&own), sizeof own)),
      barriers_(store, "fastcoll/mb", memory.rank(), memory.size(), ""),
      arenaBytes_(arenaBytes) {}

ErrorSite Rendezvous::site() const {
  return errorSite("init", memory_.identity());
}

std::string Rendezvous::processOf(const GroupRecord& record) {
  return concat("pid ", record.pid, ", host ", text(record.host));
}

std::string Rendezvous::nameOf(const GroupRecord& record, const std::string& state) {
  return concat("rank ", record.rank, " (", processOf(record), state, ")");
}

/// Whether the process that wrote the record runs: 1 yes, 0 no, -1 it cannot be seen from here.
int Rendezvous::processRuns(const GroupRecord& record) const {
  const bool visible = record.pidNamespace == own_.pidNamespace && own_.pidNamespace != 0 &&
                       text(record.bootId) == text(own_.bootId) && record.processStart != 0;
  if (!visible) return -1;
  const auto start = processStart(static_cast<int>(record.pid));
  if (!start) return -1;
  return *start == record.processStart ? 1 : 0;
}

/// Whether torchrun may have ended the record's process. torchrun counts restarts for each host,
/// and one host may restart because another did. So the counts can differ for good, and only the
/// record's age can decide. A stale record of an equal group only costs time: no process answers
/// under its nonce until the record changes. But torchrun may restart with fewer ranks, and a
/// record of another world size is an error. So stale records are sorted out before they are
/// compared.
bool Rendezvous::mayBeStale(const GroupRecord& record) const {
  if (record.generation == own_.generation || countsDiffer.load(std::memory_order_relaxed)) {
    return false;
  }
  if (text(record.bootId) == text(own_.bootId) && record.createdAt >= own_.processBegan) {
    return false;
  }
  const auto now = static_cast<std::int64_t>(nanosecondsSinceBoot());
  std::int64_t since = 0;  // the first doubt
  if (doubted_.compare_exchange_strong(since, now)) since = now;
  if (now - since < std::chrono::nanoseconds(kStaleGrace).count()) return true;
  countsDiffer.store(true, std::memory_order_relaxed);
  return false;
}

/// Whether the record's process has ended. It counts only if it has run at the same time as this
/// one: an earlier run may have left the record of another in the store.
bool Rendezvous::processEnded(const GroupRecord& record) const {
  if (processRuns(record) != 0) return false;
  if (record.createdAt >= own_.processBegan) return true;
  const auto before = ranBefore_.find(static_cast<int>(record.pid));
  return before != ranBefore_.end() && before->second == record.processStart;
}

void Rendezvous::throwEnded(const GroupRecord& record) {
  // Another rank may have detected a fault, written it and left: then that fault came first.
  throwIfGroupPublished();
  throwIfPublished(record);
  const std::string cause = concat(
      nameOf(record), ": connection closed by peer (process died) before the group's ranks had met",
      kReadLog);
  // For ranks of other hosts, which cannot detect that it has ended.
  writeFault(store_, faultKey(record.nonce), {ErrorKind::Backend, cause});
  throw GroupLost(ErrorKind::Backend, site(), cause);
}

/// Throws the fault that a rank has written. Ignores one of an earlier instance of the group, whose
/// record may still be there. That fault is from before this instance, and was there at the first
/// read. But a rank that runs, and has made as many groups of this name, has failed in this
/// instance before this rank made it.
void Rendezvous::throwIfPublished(const GroupRecord& by) {
  const auto fault = readFault(store_, faultKey(by.nonce));
  const bool ofThis = by.madeBefore >= own_.madeBefore && processRuns(by) == 1;
  std::unique_lock<std::mutex> lock(keysMutex_);
  if (!fault) sound_.insert(by.nonce);
  const bool counts = fault && (fault->publishedAt >= made_ || ofThis || sound_.contains(by.nonce));
  lock.unlock();
  if (counts) throwFault(*fault);
}

/// Throws the fault of the ranks that agreed, if they have.
void Rendezvous::throwIfGroupPublished() {
  std::string key;
  {
    const std::lock_guard<std::mutex> lock(keysMutex_);
    key = groupFault_;
  }
  if (key.empty()) return;
  if (const auto fault = readFault(store_, key)) throwFault(*fault);
}

void Rendezvous::throwFault(const Fault& fault) const {
  const bool late = fault.kind == ErrorKind::Timeout && arrivedAt_ > fault.publishedAt;
  if (late) throw CameLate(fault.kind, site(), lateCause(fault));
  throw GroupLost(fault.kind, site(), fault.text);
}

/// The error of a rank that arrives after the others have timed out. They can only name it as
/// missing.
std::string Rendezvous::lateCause(const Fault& fault) const {
  const auto seconds = [](double milliseconds) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f s", milliseconds / 1e3);
    return std::string(text);
  };
  const auto after = static_cast<double>(arrivedAt_.load() - fault.publishedAt);
  const auto idle = static_cast<double>(nanosecondsSinceBoot() - own_.createdAt) / 1e6;
  const auto before = static_cast<double>(own_.createdAt - own_.processBegan) / 1e6;
  return concat(
      "this rank reached the group's first collective ", seconds(after),
      " after the other ranks had timed out (process start to group: ", seconds(before),
      "; group to first collective: ", seconds(idle),
      "). Find the delay, or raise the group's timeout. The other ranks' error: ", fault.text);
}

std::vector<std::string> Rendezvous::faultKeys() const {
  std::lock_guard<std::mutex> lock(keysMutex_);
  std::vector<std::string> keys;
  if (!groupFault_.empty()) keys.push_back(groupFault_);
  keys.push_back(faultKey(own_.nonce));
  for (int rank = 0; rank < memory_.size(); ++rank) {
    if (rank != memory_.rank() && memory_.isDead(rank)) {
      keys.push_back(faultKey(memory_.nonceOf(rank)));
    }
  }
  return keys;
}

std::string Rendezvous::endedProcesses() const {
  return listOf(records_, [this](const GroupRecord& record) -> std::string {
    const bool left = memory_.hasLeft(static_cast<int>(record.rank));
    return processEnded(record) && !left ? nameOf(record) : "";
  });
}

void Rendezvous::publish() {
  // Do not overwrite a running process that has this rank: its peers would wait for both.
  std::string held;
  GroupRecord other{};
  if (roster_.read(memory_.rank(), held) && held.size() == sizeof other) {
    std::memcpy(&other, held.data(), sizeof other);
    const bool same = other.pid == own_.pid && other.processStart == own_.processStart;
    if (other.magic == kArenaMagic && other.generation == own_.generation && !same &&
        processRuns(other) == 1) {
      throw Error(ErrorKind::Backend, site(), "another process (", processOf(other),
                  ") joined as rank ", memory_.rank(),
                  " too, before this one. Give every process its own rank.");
    }
  }
  roster_.publish();
}

/// Checks a record before its use, because any process that reaches the store can write there.
/// False if the record may be stale.
bool Rendezvous::parse(int rank, const std::string& value, GroupRecord& record) const {
  if (value.size() != sizeof record) {
    throw Error(ErrorKind::Store, site(), "the store holds ", value.size(), " bytes for rank ",
                rank, " where a record of ", sizeof record, " was expected", kOwnStore);
  }
  std::memcpy(&record, value.data(), sizeof record);
  if (record.magic != kArenaMagic || record.bytesOfThis != sizeof record) {
    throw Error(ErrorKind::Store, site(),
                "the store holds an invalid entry of fastcoll: the record of rank ", rank,
                kOwnStore);
  }
  return !mayBeStale(record);
}

/// Throws unless the record agrees with this rank's in what one group must have in common.
void Rendezvous::require(int rank, const GroupRecord& record) const {
  if (record.abi != own_.abi || text(record.version) != text(own_.version)) {
    throw Error(ErrorKind::Backend, site(), "rank ", rank, " runs fastcoll ", text(record.version),
                " (layout ", record.abi, "), this rank ", text(own_.version), " (layout ", own_.abi,
                "). Install the same version for all ranks.");
  }
  if (record.rank != static_cast<std::uint32_t>(rank) || record.size != own_.size) {
    throw Error(ErrorKind::Backend, site(), "rank ", rank, " (", processOf(record),
                ") reports that it is rank ", record.rank, " of ", record.size,
                ". All ranks must be given the same world size.");
  }
  if (record.ringBytes != own_.ringBytes) {
    throw Error(ErrorKind::Backend, site(), "rank ", rank, " uses a ring of ", record.ringBytes,
                " bytes, this rank of ", own_.ringBytes,
                ". Set FASTCOLL_RING_BYTES alike on all ranks.");
  }
  if (text(record.network) != text(own_.network)) {
    throw Error(ErrorKind::Backend, site(), "rank ", rank, " uses the network '",
                text(record.network), "', this rank '", text(own_.network),
                "'. Set FASTCOLL_NETWORK alike on all ranks.");
  }
  if (record.tuning != own_.tuning) {
    throw Error(ErrorKind::Backend, site(), "rank ", rank,
                " uses another tuning table than this rank. Set FASTCOLL_TUNING alike on all "
                "ranks, and write the table before they start.");
  }
}

bool Rendezvous::read(int rank, GroupRecord& record) {
  if (rank == memory_.rank()) {
    record = own_;
    return true;
  }
  std::string value;
  if (!roster_.read(rank, value) || !parse(rank, value, record)) return false;
  require(rank, record);
  return true;
}

Roster::IsCurrent Rendezvous::isCurrent() const {
  return [this](int rank, const std::string& value) {
    GroupRecord record{};
    if (!parse(rank, value, record)) return false;
    require(rank, record);
    return true;
  };
}

void Rendezvous::throwIfCancelled() const {
  checkInterrupt();
  if (cancelled_.load(std::memory_order_acquire)) {
    throw GroupLost(ErrorKind::Backend, site(), "the group was aborted while its ranks connected",
                    kInitAgain);
  }
}

void Rendezvous::timedOut(const std::string& missing, Milliseconds timeout) const {
  throw Error(ErrorKind::Timeout, site(), "Timed out after ", timeout.count(), " ms; ", missing,
              kFindDelay);
}

/// Throws if another process has replaced this rank's record.
void Rendezvous::requireToBeAlone() {
  std::string mine;
  if (!roster_.read(memory_.rank(), mine) || mine.size() != sizeof own_) return;
  GroupRecord stored{};
  std::memcpy(&stored, mine.data(), sizeof stored);
  if (stored.generation != own_.generation || stored.nonce == own_.nonce) return;
  throw GroupLost(ErrorKind::Backend, site(), "another process (", processOf(stored),
                  ") joined as rank ", memory_.rank(), " too. Give every process its own rank.");
}

/// Checks one other rank, the next one each time. Throws if it has failed or its process has ended.
void Rendezvous::checkNextRank() {
  next_ = (next_ + 1) % memory_.size();
  GroupRecord record{};
  if (next_ == memory_.rank() || !read(next_, record)) return;
  throwIfPublished(record);
  if (processEnded(record)) throwEnded(record);
}

/// Equal for ranks that share memory: processes of one user on one machine and in one network
/// namespace, or with one FASTCOLL_HOST_ID.
std::string Rendezvous::hostKey(const GroupRecord& record) {
  const std::string boot = text(record.bootId), id = text(record.hostId);
  const bool alone = record.sharedMemory == SharedMemoryChoice::Off || (boot.empty() && id.empty());
  if (alone) return concat("rank ", record.rank);
  if (!id.empty()) return concat("host ", id, '\n', record.uid);
  return concat(boot, '\n', record.networkNamespace, '\n', record.uid);
}

/// `apart[host]` is '1' for hosts whose ranks do not share memory after all.
Hosts Rendezvous::hostsOf(const std::vector<GroupRecord>& records, const std::string& apart) const {
  std::vector<std::string> keys;
  for (const auto& record : records) keys.push_back(hostKey(record));
  const Hosts hosts(keys, memory_.rank());
  if (apart.find('1') == std::string::npos) return hosts;
  for (std::size_t rank = 0; rank < keys.size(); ++rank) {
    const std::size_t host = hosts.hostOf(static_cast<int>(rank));
    if (apart[host] == '1') keys[rank] = concat("rank ", rank);
  }
  return Hosts(keys, memory_.rank());
}

/// Why the records are of several hosts; "" if they are of one.
std::string Rendezvous::whySeveral(const std::vector<GroupRecord>& records) const {
  for (const auto& record : records) {
    if (record.sharedMemory == SharedMemoryChoice::Off) {
      return concat(
          "rank ", record.rank,
          " has turned shared memory off (FASTCOLL_SHARED_MEMORY or Options.shared_memory)");
    }
  }
  for (const auto& record : records) {
    const std::string who = concat("rank ", record.rank, " (host ", text(record.host), ")");
    if (text(record.hostId) != text(own_.hostId)) return who + " has another FASTCOLL_HOST_ID";
    if (!text(own_.hostId).empty()) continue;
    if (text(record.bootId) != text(own_.bootId) || text(record.bootId).empty()) {
      return who + " runs on another machine";
    }
    if (record.networkNamespace != own_.networkNamespace) {
      return who + " runs in another network namespace";
    }
  }
  for (const auto& record : records) {
    if (record.uid == own_.uid) continue;
    return concat("rank ", record.rank, " (host ", text(record.host),
                  ") runs as another user (uid ", record.uid, ")");
  }
  return "";
}

/// How many cores this rank has for itself, among the ranks on its machine.
int Rendezvous::coresEach(const std::vector<GroupRecord>& records) const {
  std::vector<CoreSet> ranks;
  for (const auto& record : records) {
    if (text(record.bootId) == text(own_.bootId)) ranks.push_back(record.cores);
  }
  return fastcoll::coresEach(own_.cores, ranks, grantedCores());
}

/// Whether these ranks' cores share a last-level cache; equal on all of them.
bool Rendezvous::sharedCache(const std::vector<int>& ranks) const {
  std::vector<CoreSet> cores, caches;
  for (const int rank : ranks) {
    cores.push_back(records_[rank].cores);
    caches.push_back(records_[rank].cache);
  }
  return shareCache(cores, caches);
}

}  // namespace fastcoll
