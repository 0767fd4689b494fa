#include "shm/group_memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "base/topology.hpp"

namespace fastcoll {
namespace {

// Time that a live writer may take for the few bytes of a fault.
constexpr Milliseconds kWriting{100};

void wakeSleepers(ControlBlock& block, Doorbell& bell) noexcept {
  for (SignatureLine& line : block.lines) futexWakeAll(lowHalf(&line.position));
  futexWakeAll(lowHalf(&block.progress.published));
  futexWakeAll(lowHalf(&block.progress.consumed));
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  futexWakeAll(lowHalf(&bell.rings));
}

Fault readFault(const AbortRecord& record) {
  return {static_cast<ErrorKind>(record.kind),
          std::string(record.text, ::strnlen(record.text, sizeof record.text))};
}

}  // namespace

GroupMemory::GroupMemory(std::shared_ptr<LocalProcess> process, GroupIdentity identity)
    : process_(std::move(process)), identity_(std::move(identity)), members_(identity_.size) {}

void GroupMemory::open(std::size_t arenaBytes) {
  std::lock_guard<std::mutex> lock(bindMutex_);
  if (isOpen()) return;
  process_->start(arenaBytes);
  blockOffset_ = arena().allocate(ControlBlock::bytes(identity_.size));
  auto* block = reinterpret_cast<ControlBlock*>(arena().base() + blockOffset_);  // zeroed
  block->nonce.store(identity_.nonce, std::memory_order_relaxed);
  block->rank = static_cast<std::uint32_t>(identity_.rank);
  block->size = static_cast<std::uint32_t>(identity_.size);
  if (early_) record(block->abort, earlyFault_);  // no peer has the block yet
  own_.store(block, std::memory_order_release);
  arena().addToDirectory(identity_.nonce, blockOffset_);
}

bool GroupMemory::bind(int peer, std::shared_ptr<PeerProcess> process, std::uint64_t nonce) {
  std::lock_guard<std::mutex> lock(bindMutex_);
  const Member* present = member(peer);
  if (present != nullptr && (present->nonce == nonce || present->confirmed.load())) {
    return present->nonce == nonce;
  }
  const DirectoryEntry* entry = findInDirectory(process->base(), nonce);
  if (entry == nullptr) return false;
  const std::uint64_t offset = entry->offset.load(std::memory_order_acquire);
  const std::size_t bytes = ControlBlock::bytes(identity_.size);
  if (offset % kPage != 0 || offset > process->bytes() || bytes > process->bytes() - offset) {
    throw Error(ErrorKind::Backend, errorHead("init", identity_), "internal error: rank ", peer,
                " announces a control block outside its memory", kReportThis);
  }
  auto* block = reinterpret_cast<ControlBlock*>(process->base() + offset);
  if (block->nonce.load(std::memory_order_relaxed) != nonce ||
      block->rank != static_cast<std::uint32_t>(peer) ||
      block->size != static_cast<std::uint32_t>(identity_.size)) {
    throw Error(ErrorKind::Backend, errorHead("init", identity_), "rank ", peer,
                " created the group as rank ", block->rank, " of ", block->size,
                ". All ranks must create the group with the same ranks.");
  }
  own().link(peer).nonce.store(nonce, std::memory_order_release);
  auto fresh = std::make_unique<Member>();
  fresh->process = std::move(process);
  fresh->nonce = nonce;
  fresh->block = block;
  fresh->entry = entry;
  members_[peer].store(fresh.get(), std::memory_order_release);
  everBound_.emplace_back(peer, std::move(fresh));
  if (aborted()) {
    passOn();  // the abort came before this peer was bound
  } else {
    hear(peer);
  }
  return true;
}

void GroupMemory::confirm(int peer, std::uint64_t nonce) {
  std::lock_guard<std::mutex> lock(bindMutex_);
  for (auto& [rank, bound] : everBound_) {
    if (rank != peer || bound->nonce != nonce) continue;
    bound->confirmed.store(true);
    members_[peer].store(bound.get(), std::memory_order_release);
  }
}

bool GroupMemory::isMutual(int peer, std::uint64_t nonce) {
  std::lock_guard<std::mutex> lock(bindMutex_);
  for (const auto& [rank, bound] : everBound_) {
    if (rank == peer && bound->nonce == nonce) return isMeant(*bound);
  }
  return false;
}

/// Whether the peer's instance has bound this instance of the group, or is about to.
bool GroupMemory::isMeant(const Member& there) const {
  return there.block->link(identity_.rank).nonce.load(std::memory_order_acquire) == identity_.nonce;
}

void GroupMemory::leave() noexcept {
  if (!isOpen() || left_) return;
  left_ = true;
  // The rank that aborted may not have written all records yet. A peer that still reads must get
  // the fault first. Otherwise it could report success for a tensor that this rank has changed.
  if (aborted()) passOn();
  arena().removeFromDirectory(identity_.nonce);
  wakeSleepers(own(), doorbell(rank()));
}

// Until a peer has left, it may read what this rank published last, and write results, messages,
// counters and faults. In collectives all ranks of a host have met each other. A peer in
// point-to-point may have met this rank although this rank has not met it, after a fault or if
// flush() has ended without it. For such a peer all waits no more than a second.
GroupMemory::~GroupMemory() {
  if (!isOpen()) return;
  leave();
  try {
    std::uint64_t large = own().largeRing.load(std::memory_order_relaxed);
    allocated_.push_back(blockOffset_);
    if (aborted() && large != 0) allocated_.push_back(std::exchange(large, 0));
    std::vector<Instance> peers;
    for (const auto& [peer, bound] : everBound_) peers.push_back(*bound);
    everBound_.clear();
    auto inUse = [arena = process_->arena(), peers = std::move(peers), large,
                  offsets = std::move(allocated_)]() mutable {
      // Drop each at once, because an Instance keeps its process's memory mapped.
      std::erase_if(peers,
                    [](const Instance& peer) { return peer.process->died() || peer.left(); });
      if (!peers.empty()) return true;
      if (large != 0) arena->release(large);
      for (const std::uint64_t offset : offsets) arena->retire(offset);
      return false;
    };
    if (inUse()) process_->watch(std::move(inUse));
  } catch (const std::bad_alloc&) {
    // There is no memory for the lists, so the extents stay with the arena.
  }
  process_->prune();
}

std::uint64_t GroupMemory::allocate(std::size_t bytes) {
  std::lock_guard<std::mutex> lock(bindMutex_);
  allocated_.reserve(allocated_.size() + 1);
  return allocated_.emplace_back(arena().allocate(bytes));
}

std::uint8_t* GroupMemory::inPeer(int peer, std::uint64_t offset, std::size_t bytes) const {
  const PeerProcess& there = process(peer);
  if (offset == 0 || offset > there.bytes() || bytes > there.bytes() - offset) {
    throw Error(ErrorKind::Backend, "fastcoll [group '", identity_.name,
                "']: internal error: ", memberName(peer), " points outside its shared memory",
                kReportThis);
  }
  return there.base() + offset;
}

bool GroupMemory::isDead(int peer) const {
  return isBound(peer) && process(peer).died() && !process(peer).left();
}

bool GroupMemory::Instance::left() const {
  // Not read from the block, which may be freed by now.
  return process->left() || entry->nonce.load(std::memory_order_acquire) != nonce;
}

bool GroupMemory::hasLeft(int peer) const {
  return isBound(peer) && member(peer)->left();
}

std::string GroupMemory::memberName(int peer) const {
  // Other ranks read the name of this rank.
  if (peer == identity_.rank) {
    return concat("rank ", peer, " (pid ", ::getpid(), ", host ", hostName(), ")");
  }
  if (!isBound(peer)) {
    const std::lock_guard<std::mutex> lock(namesMutex_);
    const std::size_t place = peer;
    if (place >= names_.size() || names_[place].empty()) return concat("rank ", peer);
    return concat("rank ", peer, " (", names_[place], ")");
  }
  return concat("rank ", peer, " (", process(peer).name(), ")");
}

void GroupMemory::nameMember(int peer, std::string name) {
  const std::lock_guard<std::mutex> lock(namesMutex_);
  names_.resize(size());
  names_[peer] = std::move(name);
}

std::string GroupMemory::causeOfSilence(int peer, const std::string& call) const {
  const bool dead = isDead(peer);
  const char* const what =
      dead ? ": connection closed by peer (process died)" : " left the group (close notice sent)";
  const std::string when = call.empty() ? "" : (dead ? " in " : " before ") + call;
  return concat(memberName(peer), what, when, dead ? kReadLog : kSameCalls);
}

void GroupMemory::abort(ErrorKind kind, const std::string& cause) noexcept {
  if (!isOpen()) {
    std::lock_guard<std::mutex> lock(bindMutex_);
    if (!isOpen()) {
      if (!early_.load(std::memory_order_relaxed)) {
        earlyFault_ = {kind, cause};
        early_.store(true, std::memory_order_release);
      }
      return;
    }
  }
  // kWriting does not count as a record here, because its writer may have died.
  if (own().abort.state.load(std::memory_order_acquire) != AbortRecord::kSet)
    tellAll({kind, cause});
}

/// Writes the fault into a member's record and returns true. If the record already has a fault,
/// reads it into `fault` and returns false. Also false if a live writer takes too long.
bool GroupMemory::record(AbortRecord& into, Fault& fault) noexcept {
  const std::uint32_t mine = AbortRecord::kWriting + static_cast<std::uint32_t>(rank());
  std::uint32_t seen = AbortRecord::kNone;
  const auto until = Clock::now() + kWriting;
  while (!into.state.compare_exchange_strong(seen, mine, std::memory_order_acq_rel)) {
    if (seen == AbortRecord::kSet) {
      fault = readFault(into);
      return false;
    }
    if (seen == AbortRecord::kNone) continue;
    // Another rank is writing. If that rank has died, its claim, which `seen` holds, is replaced.
    const auto writer = static_cast<std::int64_t>(seen - AbortRecord::kWriting);
    const bool dead = writer < size() && isDead(static_cast<int>(writer));
    if (dead) continue;
    if (Clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    seen = AbortRecord::kNone;
  }
  into.kind = static_cast<std::uint32_t>(fault.kind);
  const std::size_t length = std::min(fault.text.size(), sizeof into.text - 1);
  std::memcpy(into.text, fault.text.data(), length);
  into.text[length] = '\0';
  into.state.store(AbortRecord::kSet, std::memory_order_release);
  return true;
}

// Two ranks may detect two faults at once. Both write the records in rank order, and go on with the
// fault that they find there. So the first writer of the first record decides for all. A rank's own
// record has no special place; otherwise the rank could raise a fault that no other rank gets.
void GroupMemory::tellAll(Fault fault) noexcept {
  const auto listens = [this](int peer) {
    return peer == identity_.rank || (isBound(peer) && !hasLeft(peer));
  };
  // Write all records before waking any rank. Ranks sleep on words of other ranks' blocks; a rank
  // that woke before its own record was set would sleep for another slice.
  bool told = false;
  for (int peer = 0; peer < identity_.size; ++peer) {
    if (listens(peer)) told = record(recordOf(peer), fault) || told;
  }
  for (int peer = 0; told && peer < identity_.size; ++peer) {
    if (!listens(peer)) continue;
    wakeSleepers(peer == identity_.rank ? own() : block(peer), doorbell(peer));
  }
}

Doorbell& GroupMemory::doorbell(int ofRank) const {
  if (ofRank == identity_.rank) return arena().header()->doorbell(identity_.nonce);
  const Member& there = *member(ofRank);
  return there.process->header().doorbell(there.nonce);
}

AbortRecord& GroupMemory::recordOf(int member) const {
  return (member == identity_.rank ? own() : block(member)).abort;
}

void GroupMemory::passOn() noexcept {
  if (isOpen()) tellAll(recorded());
}

bool GroupMemory::hear(int peer) noexcept {
  if (peer == identity_.rank || !isBound(peer) || !isMeant(*member(peer))) return false;
  if (recordOf(peer).state.load(std::memory_order_acquire) != AbortRecord::kSet) return false;
  tellAll(readFault(recordOf(peer)));
  return true;
}

Fault GroupMemory::recorded() const {
  if (!isOpen()) return earlyFault_;  // early_ is true, and this was written before it
  const AbortRecord& fault = own().abort;
  // The writer may be between claim and text, or may have died there: wait for kWriting at most.
  const auto until = Clock::now() + kWriting;
  std::uint32_t state = fault.state.load(std::memory_order_acquire);
  while (state >= AbortRecord::kWriting && Clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    state = fault.state.load(std::memory_order_acquire);
  }
  if (state == AbortRecord::kSet) return readFault(fault);
  const std::uint32_t writer = state - AbortRecord::kWriting;
  const bool known = writer < static_cast<std::uint32_t>(size());
  return {ErrorKind::Backend, concat(known ? memberName(static_cast<int>(writer)) : "a rank",
                                     " died while it reported a fault", kReadLog)};
}

void GroupMemory::throwAborted(const std::string& prefix) const {
  const Fault fault = recorded();
  throw Error(fault.kind, prefix + fault.text);
}

}  // namespace fastcoll
