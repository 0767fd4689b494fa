// One rank's view of a group's shared memory: its own control block, the mapped blocks of the
// peers, and the group's first fault.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "shm/control_block.hpp"
#include "shm/process.hpp"
#include "shm/wait.hpp"

namespace fastcoll {

struct GroupIdentity {
  std::string name;
  int rank = 0;
  int size = 1;
  std::uint64_t nonce = 0;  // identifies this rank's instance of the group
};

class GroupMemory {
 public:
  GroupMemory(std::shared_ptr<LocalProcess> process, GroupIdentity identity);
  /// Frees the memory, unless close() found that a peer may still use it.
  ~GroupMemory();

  /// Creates this rank's control block, once.
  void open(std::size_t arenaBytes);
  bool isOpen() const { return own_.load(std::memory_order_acquire) != nullptr; }
  /// Maps a peer's control block. Returns false while the peer has not opened it, or if another
  /// instance is confirmed. Throws Error(Backend) if the memory there is not that rank's block.
  bool bind(int peer, std::shared_ptr<PeerProcess> process, std::uint64_t nonce);
  bool isBound(int peer) const { return member(peer) != nullptr; }
  std::vector<int> boundPeers() const;

  const GroupIdentity& identity() const { return identity_; }
  int rank() const { return identity_.rank; }
  int size() const { return identity_.size; }
  ControlBlock& own() const { return *own_.load(std::memory_order_acquire); }
  ControlBlock& block(int peer) const { return *member(peer)->block; }
  PeerProcess& process(int peer) const { return *member(peer)->process; }
  /// The doorbell of this rank, or of a bound one. It lives as long as the process is mapped.
  Doorbell& doorbell(int ofRank) const;
  Arena& arena() const { return *process_->arena(); }
  /// How a peer uses memory of this rank. WriteLate: it may write even after this rank has closed
  /// the group.
  enum class Use { Read, Write, WriteLate };
  /// Reserves zeroed arena memory for this rank and `peer`. It is freed with the group's own
  /// memory, or with WriteLate once the peer has left or died too.
  std::uint64_t allocate(std::size_t bytes, Use use, int peer);
  /// Peers may read this rank's block even after it has left: keeps it until they have left too.
  void keepForReaders() { read_ = true; }

  /// `bytes` at `offset` of a peer's arena. Throws Error(Backend) if they are not inside it, so a
  /// broken peer cannot make this process read or write elsewhere.
  std::uint8_t* inPeer(int peer, std::uint64_t offset, std::size_t bytes) const;

  /// Marks the peer's instance of this nonce, bound before, as the one to keep: it belongs to this
  /// instance of the group.
  void confirm(int peer, std::uint64_t nonce);
  /// Whether the peer's instance of this nonce, bound before, has bound this instance.
  bool isMutual(int peer, std::uint64_t nonce);
  /// Until confirm(), the bound block may belong to an earlier group of the same name.
  bool isConfirmed(int peer) const { return isBound(peer) && member(peer)->confirmed.load(); }

  /// Nonce of the peer's bound instance; 0 if none is bound.
  std::uint64_t nonceOf(int peer) const { return isBound(peer) ? member(peer)->nonce : 0; }

  /// Whether the peer's process has died without a clean leave.
  bool isDead(int peer) const;
  /// Whether the peer has left this group.
  bool hasLeft(int peer) const;
  /// "rank 2 (pid 4711, host h1)"
  std::string memberName(int peer) const;
  /// Sets the name of a member that is not bound: "pid 4711, host h2".
  void nameMember(int peer, std::string name);
  /// The reason why a peer will never answer, and the `call` in which it is missed, if known.
  std::string causeOfSilence(int peer, const std::string& call = "") const;

  /// Ends the use of the group, after a short wait for peers that still read this rank's last
  /// segments. `keep`: a peer may read even later, so the memory stays until all peers have left.
  void close(bool keep) noexcept;
  /// Marks this rank as having left the group and wakes the peers. From then on it accesses no
  /// peer's memory. Call it after close(); otherwise the destructor does.
  void leave() noexcept;

  /// Records the group's first fault on every member and wakes all of them. If another rank was
  /// first, its fault is recorded instead. Later calls change nothing. Never throws.
  void abort(ErrorKind kind, const std::string& cause) noexcept;
  bool aborted() const {
    if (!isOpen()) return early_.load(std::memory_order_acquire);
    return own().abort.state.load(std::memory_order_acquire) != AbortRecord::kNone;
  }
  /// Writes the fault that this rank has recorded to all peers. Never throws.
  void passOn() noexcept;
  /// Takes over a fault that the peer recorded before it could reach this rank; true if there is
  /// one. Never throws.
  bool hear(int peer) noexcept;
  /// The fault that this rank has recorded.
  Fault recorded() const;
  /// Throws Error with the recorded fault.
  [[noreturn]] void throwAborted(const ErrorSite& site) const;

 private:
  /// An instance of the group on a peer.
  struct Instance {
    std::shared_ptr<PeerProcess> process;
    std::uint64_t nonce = 0;
    ControlBlock* block = nullptr;
    const DirectoryEntry* entry = nullptr;

    bool left() const;
  };
  struct Member : Instance {
    std::atomic<bool> confirmed{false};
  };
  const Member* member(int peer) const { return members_[peer].load(std::memory_order_acquire); }
  bool isMeant(const Member& there) const;
  AbortRecord& recordOf(int member) const;
  bool record(AbortRecord& into, Fault& fault) noexcept;
  void recordOnAll(Fault fault) noexcept;
  void giveBack(std::uint64_t offset, std::optional<int> late = std::nullopt);

  std::shared_ptr<LocalProcess> process_;
  const GroupIdentity identity_;
  std::uint64_t blockOffset_ = 0;
  bool closed_ = false;
  bool keep_ = false;
  std::atomic<bool> read_{false};
  bool left_ = false;
  std::atomic<ControlBlock*> own_{nullptr};
  std::mutex bindMutex_;
  // A bound member is never changed, only replaced, because collectives may read it while
  // point-to-point binds another one.
  std::vector<std::atomic<Member*>> members_;
  std::vector<std::pair<int, std::unique_ptr<Member>>> everBound_;
  struct Allocated {
    std::uint64_t offset;
    Use use;
    int peer;
  };
  std::vector<Allocated> allocated_;
  std::atomic<bool> early_{false};  // a fault before there was a block to record it in
  Fault earlyFault_;
  mutable std::mutex namesMutex_;
  std::vector<std::string> names_;
};

}  // namespace fastcoll
