#include "shm/group_memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>

#include "base/topology.hpp"
#include "base/utf8.hpp"

namespace fastcoll {
namespace {

// Time that a live writer may take for the few bytes of a fault.
constexpr Milliseconds kWriting{100};

void wakeSleepers(ControlBlock& block, Doorbell& bell) noexcept {
  for (ArrivalLine& line : block.arrivals) futexWakeAll(lowHalf(&line.position));
  futexWakeAll(lowHalf(&block.progress.published));
  futexWakeAll(lowHalf(&block.progress.consumed));
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  futexWakeAll(lowHalf(&bell.rings));
}

Fault readFault(const AbortRecord& record) {
  return {static_cast<ErrorKind>(record.kind),
          validUtf8(std::string(record.text, ::strnlen(record.text, sizeof record.text)))};
}

}  // namespace

GroupMemory::GroupMemory(std::shared_ptr<LocalProcess> process, GroupIdentity identity)
    : process_(std::move(process)), identity_(std::move(identity)), members_(identity_.size) {}

void GroupMemory::open(std::size_t arenaBytes) {
  std::lock_guard<std::mutex> lock(bindMutex_);
  if (isOpen()) return;
  process_->start(arenaBytes);
  process_->retireHeld();
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
    throw Error(ErrorKind::Backend, errorSite("init", identity_), "internal error: rank ", peer,
                " announces a control block outside its memory", kReportThis);
  }
  auto* block = reinterpret_cast<ControlBlock*>(process->base() + offset);
  if (block->nonce.load(std::memory_order_relaxed) != nonce ||
      block->rank != static_cast<std::uint32_t>(peer) ||
      block->size != static_cast<std::uint32_t>(identity_.size)) {
    throw Error(ErrorKind::Backend, errorSite("init", identity_), "rank ", peer,
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

std::vector<int> GroupMemory::boundPeers() const {
  std::vector<int> peers;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank() && isBound(peer)) peers.push_back(peer);
  }
  return peers;
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

void GroupMemory::close(bool keep) noexcept {
  if (!isOpen() || closed_) return;
  closed_ = true;
  // The rank that aborted may not have written all records yet. A peer that still reads must get
  // the fault before the memory is freed. Otherwise it would report success for what it read.
  if (aborted()) passOn();
  // A peer may still read the last segments that this rank published. The extents are freed only
  // when every peer has consumed all of them, left or died.
  const std::uint64_t published = own().progress.published.load(std::memory_order_relaxed);
  const auto finished = [&](int peer) {
    if (peer == identity_.rank || !isBound(peer) || aborted() || isDead(peer) || hasLeft(peer)) {
      return true;
    }
    return block(peer).progress.consumed.load(std::memory_order_acquire) >= published;
  };
  const auto until = Clock::now() + Milliseconds(200);
  for (int peer = 0; peer < identity_.size; ++peer) {
    while (!finished(peer) && Clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    keep = keep || !finished(peer);
  }
  keep_ = keep;
}

void GroupMemory::leave() noexcept {
  if (!isOpen() || left_) return;
  left_ = true;
  arena().removeFromDirectory(identity_.nonce);
  wakeSleepers(own(), doorbell(rank()));
}

GroupMemory::~GroupMemory() {
  if (!isOpen()) return;
  close(false);
  leave();
  const std::uint64_t large = own().largeRing.load(std::memory_order_relaxed);
  try {
    // Without a fault, close() has found that no peer uses the ring any more.
    if (large != 0) keep_ || aborted() ? giveBack(large) : arena().release(large);
    for (const auto& [offset, use, peer] : allocated_) {
      const bool late = use == Use::WriteLate;
      use == Use::Read && !keep_ ? arena().retire(offset)
                                 : giveBack(offset, late ? std::optional(peer) : std::nullopt);
    }
    giveBack(blockOffset_);
  } catch (const std::bad_alloc&) {
    // There is no memory for the list of peers, so the extents stay with the arena.
  }
  everBound_.clear();
  process_->prune();
}

/// Gives back memory in which peers write: bytes for the ring's owner, counters, faults. After a
/// fault, a peer that is stopped or has not detected it may still do so. Then the memory is retired
/// once all peers have died or left, here or in a later retireHeld(). This applies without a fault
/// too, if close() must keep the memory, if a peer still counts as asleep or may read this
/// rank's device calls, and for the peer `late`, which may still write.
void GroupMemory::giveBack(std::uint64_t offset, std::optional<int> late) {
  std::vector<Instance> writers;
  const bool any =
      keep_ || read_ || aborted() || own().progress.waiters.load(std::memory_order_seq_cst) > 0;
  for (const auto& [peer, bound] : everBound_) {
    if (any || peer == late) writers.push_back(*bound);
  }
  process_->hold(offset, [peers = std::move(writers)]() mutable {
    // Drop them at once, because an Instance keeps its process's memory mapped.
    std::erase_if(peers, [](const Instance& peer) { return peer.process->died() || peer.left(); });
    return peers.empty();
  });
}

std::uint64_t GroupMemory::allocate(std::size_t bytes, Use use, int peer) {
  std::lock_guard<std::mutex> lock(bindMutex_);
  allocated_.reserve(allocated_.size() + 1);
  allocated_.push_back({arena().allocate(bytes), use, peer});
  return allocated_.back().offset;
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
    recordOnAll({kind, cause});
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
void GroupMemory::recordOnAll(Fault fault) noexcept {
  const auto reachable = [this](int peer) {
    return peer == identity_.rank || (isBound(peer) && !hasLeft(peer));
  };
  // Write all records before waking any rank. Ranks sleep on words of other ranks' blocks; a rank
  // that woke before its own record was set would sleep for another slice.
  bool wrote = false;
  for (int peer = 0; peer < identity_.size; ++peer) {
    if (reachable(peer)) wrote = record(recordOf(peer), fault) || wrote;
  }
  for (int peer = 0; wrote && peer < identity_.size; ++peer) {
    if (!reachable(peer)) continue;
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
  if (isOpen()) recordOnAll(recorded());
}

bool GroupMemory::hear(int peer) noexcept {
  if (peer == identity_.rank || !isBound(peer) || !isMeant(*member(peer))) return false;
  if (recordOf(peer).state.load(std::memory_order_acquire) != AbortRecord::kSet) return false;
  recordOnAll(readFault(recordOf(peer)));
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

void GroupMemory::throwAborted(const ErrorSite& site) const {
  const Fault fault = recorded();
  throw Error(fault.kind, site, fault.text);
}

}  // namespace fastcoll
