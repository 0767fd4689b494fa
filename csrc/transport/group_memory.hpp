// The shared memory of one group as one of its ranks sees it: its own control block, the mapped
// blocks of the peers, and the group's first fault.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../base/clock.hpp"
#include "../base/error.hpp"
#include "control_block.hpp"
#include "process.hpp"
#include "wait.hpp"

namespace fastcoll {

struct GroupIdentity {
  std::string name;
  int rank = 0;
  int size = 1;
  std::uint64_t nonce = 0;  // of this instance of the group on this rank
};

class GroupMemory {
 public:
  GroupMemory(std::shared_ptr<LocalProcess> process, GroupIdentity identity);
  /// Gives the memory back, unless close() found that a peer may still use it.
  ~GroupMemory();
  GroupMemory(const GroupMemory&) = delete;
  GroupMemory& operator=(const GroupMemory&) = delete;

  /// Makes this rank's control block, once.
  void open(std::size_t arenaBytes);
  bool isOpen() const { return own_.load(std::memory_order_acquire) != nullptr; }
  /// Maps a peer's control block; false while the peer has not opened it. Throws Error(Backend) if
  /// what lies there is not the block of that rank.
  bool bind(int peer, std::shared_ptr<PeerProcess> process, std::uint64_t nonce);
  bool isBound(int peer) const { return member(peer) != nullptr; }

  const GroupIdentity& identity() const { return identity_; }
  int rank() const { return identity_.rank; }
  int size() const { return identity_.size; }
  ControlBlock& own() const { return *own_.load(std::memory_order_acquire); }
  ControlBlock& block(int peer) const { return *member(peer)->block; }
  PeerProcess& process(int peer) const { return *member(peer)->process; }
  Arena& arena() const { return *process_->arena(); }
  /// What the peers do with memory of this rank.
  enum class Peers { Read, Write };
  /// Reserves zeroed memory of the arena for the group, which is given back with the group's own.
  std::uint64_t allocate(std::size_t bytes, Peers use);

  /// `bytes` at `offset` of a peer's arena; throws Error(Backend) when that is not inside it, so
  /// that a broken peer cannot make this process read or write elsewhere.
  std::uint8_t* inPeer(int peer, std::uint64_t offset, std::size_t bytes) const;

  /// Tells that the peer's instance of this nonce, bound before, is the one to stay with: the peer
  /// means this instance of the group too.
  void confirm(int peer, std::uint64_t nonce);
  /// The peer's instance of this nonce, bound before, has bound this instance.
  bool isMutual(int peer, std::uint64_t nonce);
  /// Until then the bound block may be that of an earlier group of the same name.
  bool isConfirmed(int peer) const { return isBound(peer) && member(peer)->confirmed.load(); }

  /// The instance of the group that is bound; 0: none is.
  std::uint64_t nonceOf(int peer) const { return isBound(peer) ? member(peer)->nonce : 0; }

  /// The peer's process is dead, or has left this group.
  bool isDead(int peer) const;
  bool hasLeft(int peer) const;
  /// "rank 2 (pid 4711, host h1)"
  std::string memberName(int peer) const;
  /// What a member that is not bound is called: "pid 4711, host h2".
  void nameMember(int peer, std::string name);
  /// Why a peer will never answer, and in which `call`, if it is known.
  std::string causeOfSilence(int peer, const std::string& call = "") const;

  /// Ends the use of the group, after a short wait for peers that still read this rank's last
  /// segments. `keep`: a peer may read later still, so the memory stays with the arena.
  void close(bool keep) noexcept;
  /// Tells the peers that this rank has left the group, and touches nobody's memory any more. After
  /// close(); at the latest the end of this object does so.
  void leave() noexcept;

  /// Records the group's first fault on every member and wakes all of them. Where another rank was
  /// first, its fault is told instead; later calls change nothing. Never throws.
  void abort(ErrorKind kind, const std::string& cause) noexcept;
  bool aborted() const {
    if (!isOpen()) return early_.load(std::memory_order_acquire);
    return own().abort.state.load(std::memory_order_acquire) != AbortRecord::kNone;
  }
  /// Tells all peers of the fault that this rank knows of. Never throws.
  void passOn() noexcept;
  /// Takes over a fault that the peer recorded when it could not tell this rank yet; true if there
  /// is one. Never throws.
  bool hear(int peer) noexcept;
  /// The fault that this rank knows of.
  void recorded(ErrorKind& kind, std::string& cause) const;
  /// Throws Error with the recorded cause behind `prefix`.
  [[noreturn]] void throwAborted(const std::string& prefix) const;

 private:
  /// An instance of the group on a peer.
  struct Instance {
    std::shared_ptr<PeerProcess> process;
    std::uint64_t nonce = 0;
    ControlBlock* block = nullptr;

    bool left() const;
  };
  struct Member : Instance {
    std::atomic<bool> confirmed{false};
  };
  const Member* member(int peer) const { return members_[peer].load(std::memory_order_acquire); }
  bool isMeant(const Member& there) const;
  AbortRecord& recordOf(int member) const;
  bool record(AbortRecord& into, ErrorKind& kind, std::string& cause) noexcept;
  void tellAll(ErrorKind kind, std::string cause) noexcept;
  void giveBackRing(std::uint64_t offset);
  void giveBackCounts(std::uint64_t offset);
  using Over = std::function<bool(const Instance&)>;
  void retireAfter(std::uint64_t offset, std::vector<Instance> writers, Over over);

  std::shared_ptr<LocalProcess> process_;
  const GroupIdentity identity_;
  std::uint64_t blockOffset_ = 0;
  bool closed_ = false;
  bool keep_ = false;
  std::atomic<ControlBlock*> own_{nullptr};
  std::mutex bindMutex_;
  // A bound member is never changed, only replaced: collectives may look at it while point-to-point
  // binds another one.
  std::vector<std::atomic<Member*>> members_;
  std::vector<std::pair<int, std::unique_ptr<Member>>> everBound_;
  std::vector<std::pair<std::uint64_t, Peers>> allocated_;
  std::atomic<bool> early_{false};  // a fault before there was a block to record it in
  ErrorKind earlyKind_ = ErrorKind::Backend;
  std::string earlyCause_;
  mutable std::mutex namesMutex_;
  std::vector<std::string> names_;
};

}  // namespace fastcoll
