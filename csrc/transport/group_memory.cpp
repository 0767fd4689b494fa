#include "group_memory.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <thread>

#include "../base/topology.hpp"

namespace fastcoll {
namespace {

bool record(AbortRecord& into, ErrorKind kind, const std::string& cause) noexcept {
  std::uint32_t none = AbortRecord::kNone;
  if (!into.state.compare_exchange_strong(none, AbortRecord::kWriting, std::memory_order_acq_rel)) {
    return false;
  }
  into.kind = static_cast<std::uint32_t>(kind);
  const std::size_t length = std::min(cause.size(), sizeof into.text - 1);
  std::memcpy(into.text, cause.data(), length);
  into.text[length] = '\0';
  into.state.store(AbortRecord::kSet, std::memory_order_release);
  return true;
}

void wakeSleepers(ControlBlock& block) noexcept {
  futexWakeAll(lowHalf(&block.progress.published));
  futexWakeAll(lowHalf(&block.progress.consumed));
  block.doorbell.rings.fetch_add(1, std::memory_order_seq_cst);
  futexWakeAll(lowHalf(&block.doorbell.rings));
}

}  // namespace

const char* collectiveName(Collective collective) {
  switch (collective) {
    case Collective::AllReduce:
      return "all_reduce";
    case Collective::Broadcast:
      return "broadcast";
    case Collective::Reduce:
      return "reduce";
    case Collective::AllGather:
      return "all_gather";
    case Collective::Gather:
      return "gather";
    case Collective::Scatter:
      return "scatter";
    case Collective::ReduceScatter:
      return "reduce_scatter";
    case Collective::AllToAll:
      return "all_to_all";
    case Collective::Barrier:
      return "barrier";
    case Collective::Send:
      return "send";
    case Collective::Recv:
      return "recv";
  }
  return "unknown";
}

GroupMemory::GroupMemory(std::shared_ptr<LocalProcess> process, GroupIdentity identity)
    : process_(std::move(process)),
      identity_(std::move(identity)),
      members_(static_cast<std::size_t>(identity_.size)) {}

void GroupMemory::open(std::size_t arenaBytes) {
  std::lock_guard<std::mutex> lock(bindMutex_);
  if (isOpen()) return;
  process_->start(arenaBytes);
  blockOffset_ = arena().allocate(ControlBlock::bytes(identity_.size));
  auto* block = reinterpret_cast<ControlBlock*>(arena().base() + blockOffset_);  // zeroed
  block->nonce = identity_.nonce;
  block->rank = static_cast<std::uint32_t>(identity_.rank);
  block->size = static_cast<std::uint32_t>(identity_.size);
  own_.store(block, std::memory_order_release);
  arena().addToDirectory(identity_.nonce, blockOffset_);
}

bool GroupMemory::bind(int peer, std::shared_ptr<PeerProcess> process, std::uint64_t nonce) {
  std::lock_guard<std::mutex> lock(bindMutex_);
  auto& member = members_[static_cast<std::size_t>(peer)];
  if (member.block != nullptr && member.nonce == nonce) return true;
  const DirectoryEntry* entry = findInDirectory(process->base(), nonce);
  if (entry == nullptr) return false;
  const std::uint64_t offset = entry->offset.load(std::memory_order_acquire);
  const std::size_t bytes = ControlBlock::bytes(identity_.size);
  if (offset % kPage != 0 || offset > process->bytes() || bytes > process->bytes() - offset) {
    throw Error(ErrorKind::Backend, concat("fastcoll [group '", identity_.name, "']: rank ", peer,
                                           " announces a control block outside its memory"));
  }
  auto* block = reinterpret_cast<ControlBlock*>(process->base() + offset);
  if (block->nonce != nonce || block->rank != static_cast<std::uint32_t>(peer) ||
      block->size != static_cast<std::uint32_t>(identity_.size)) {
    throw Error(
        ErrorKind::Backend,
        concat("fastcoll [group '", identity_.name, "', rank ", identity_.rank, "/", identity_.size,
               "]: the control block of rank ", peer, " says rank ", block->rank, " of ",
               block->size, ". All ranks must create the group with the same ranks."));
  }
  own().link(peer).nonce.store(nonce, std::memory_order_release);
  member.process = std::move(process);
  member.nonce = nonce;
  member.block = block;
  return true;
}

void GroupMemory::close(bool keep) noexcept {
  if (!isOpen() || closed_) return;
  closed_ = true;
  // A peer may still read the last segments that this rank published. The extents are given back
  // only when every peer has consumed all of them or is gone; otherwise they stay with the arena,
  // which goes with the process's last group.
  const std::uint64_t published = own().progress.published.load(std::memory_order_relaxed);
  const auto finished = [&](int peer) {
    if (peer == identity_.rank || !isBound(peer) || aborted() || isDead(peer) || hasLeft(peer)) {
      return true;
    }
    return block(peer).progress.consumed.load(std::memory_order_acquire) >= published;
  };
  const auto until = Clock::now() + Milliseconds(200);
  for (bool all = false; !all;) {
    all = true;
    for (int peer = 0; peer < identity_.size; ++peer) all = all && finished(peer);
    if (all) break;
    if (Clock::now() >= until) {
      keep = true;
      break;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  keep_ = keep;
  arena().removeFromDirectory(identity_.nonce);
  own().closed.store(1, std::memory_order_seq_cst);
  wakeSleepers(own());
}

GroupMemory::~GroupMemory() {
  if (!isOpen()) return;
  close(false);
  if (!keep_) {
    const std::uint64_t large = own().largeSlots.load(std::memory_order_relaxed);
    if (large != 0) arena().release(large);
    for (int peer = 0; peer < identity_.size; ++peer) {
      const std::uint64_t channel = own().link(peer).channel.load(std::memory_order_relaxed);
      if (channel != 0) arena().release(channel);
    }
    arena().release(blockOffset_);
  }
  members_.clear();
  process_->prune();
}

std::uint8_t* GroupMemory::inPeer(int peer, std::uint64_t offset, std::size_t bytes) const {
  const PeerProcess& there = process(peer);
  if (offset == 0 || offset > there.bytes() || bytes > there.bytes() - offset) {
    throw Error(ErrorKind::Backend, concat("fastcoll [group '", identity_.name, "']: ",
                                           memberName(peer), " points outside its shared memory"));
  }
  return there.base() + offset;
}

bool GroupMemory::isDead(int peer) const {
  return isBound(peer) && process(peer).died() && !process(peer).left();
}

bool GroupMemory::hasLeft(int peer) const {
  if (!isBound(peer)) return false;
  const auto& member = members_[static_cast<std::size_t>(peer)];
  // A block that was given back is zeroed or somebody else's: then the nonce differs.
  return member.process->left() || block(peer).nonce != member.nonce ||
         block(peer).closed.load(std::memory_order_acquire) != 0;
}

std::string GroupMemory::memberName(int peer) const {
  if (peer == identity_.rank) return concat("rank ", peer, " (this process)");
  if (!isBound(peer)) return concat("rank ", peer);
  return concat("rank ", peer, " (", process(peer).name(), ")");
}

std::string GroupMemory::causeOfSilence(int peer) const {
  if (isDead(peer)) {
    return concat(memberName(peer), ": connection closed by peer (process died)");
  }
  return concat(memberName(peer), " left the group (goodbye sent) before taking part");
}

void GroupMemory::abort(ErrorKind kind, const std::string& cause) noexcept {
  if (!isOpen()) return;
  if (!record(own().abort, kind, cause)) return;
  wakeSleepers(own());
  for (int peer = 0; peer < identity_.size; ++peer) {
    if (peer == identity_.rank || !isBound(peer) || hasLeft(peer)) continue;
    record(block(peer).abort, kind, cause);
    wakeSleepers(block(peer));
  }
}

void GroupMemory::throwAborted(const std::string& prefix) const {
  const AbortRecord& fault = own().abort;
  // The writer may be between claim and text, or have died there: wait a little, not for ever.
  for (int i = 0; i < 1000 && fault.state.load(std::memory_order_acquire) == AbortRecord::kWriting;
       ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  const bool set = fault.state.load(std::memory_order_acquire) == AbortRecord::kSet;
  char text[sizeof fault.text + 1] = {};
  if (set) std::memcpy(text, fault.text, sizeof fault.text);
  const auto kind = set ? static_cast<ErrorKind>(fault.kind) : ErrorKind::Backend;
  throw Error(kind,
              prefix + (set ? std::string(text) : "the group was aborted by a rank that died"));
}

}  // namespace fastcoll
