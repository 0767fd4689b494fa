// A process among the others of its host: its shared arena, the keeper thread that shows peers that
// it is alive, the unix socket that exchanges arenas, and the connected peers.
//
// Nothing is created before it is needed: until start(), a LocalProcess is a pair of random names.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/topology.hpp"
#include "shm/arena.hpp"
#include "shm/hello.hpp"

namespace fastcoll {

/// The address of a process for its peers; part of a group record in the store.
struct ProcessAddress {
  Nonce128 nonce{};       // names this incarnation of the process
  Nonce128 socketName{};  // abstract unix socket: unguessable, closed with its owner
};

/// Another process's arena, mapped here.
class PeerProcess {
 public:
  /// A process is its own peer too (several ranks may live in one process as threads).
  explicit PeerProcess(std::shared_ptr<Arena> own);
  PeerProcess(std::uint8_t* base, std::size_t bytes) : base_(base), bytes_(bytes) {}
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  std::uint8_t* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }
  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(base_); }
  /// Whether its keeper thread has ended, as the kernel marks it. One load; true within 0.1 ms of
  /// any death.
  bool died() const { return (header().life.load(std::memory_order_acquire) & kOwnerDied) != 0; }
  /// Whether it left cleanly; see markCleanLeave().
  bool left() const { return header().bye.load(std::memory_order_acquire) != 0; }
  /// "pid 4711, host h1"
  std::string name() const;
  /// State letter of /proc, or '?' if it cannot be known, as in another pid namespace.
  char state() const;

 private:
  std::shared_ptr<Arena> own_;  // set if this is the process itself
  std::uint8_t* base_;
  std::size_t bytes_;
};

class LocalProcess {
 public:
  /// The process's only instance. Its groups share it, and it ends with the last of them.
  static std::shared_ptr<LocalProcess> get();
  ~LocalProcess();

  const ProcessAddress& address() const { return address_; }
  /// Creates the arena, the socket and the keeper thread, once. Throws Error(Backend).
  void start(std::size_t arenaBytes);
  /// Valid after start(). No other thread may run start() meanwhile.
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  bool started() const;

  /// The peer at `address`; connects to it unless it is connected already. Never waits. Returns
  /// nullptr in two cases: no process listens there now (a stale address, or a process that has not
  /// started yet), or the peer has not answered yet (it may be stopped). Then call again: one
  /// connection to a peer stays open until it answers. Throws Error(Network) if the answer is wrong
  /// or memory cannot be mapped.
  std::shared_ptr<PeerProcess> connect(const ProcessAddress& address);

  /// Calls retireHeld(), drops peers that no group uses any more, and closes connections that have
  /// no answer yet.
  void prune();
  /// Retires held memory whose writers have finished.
  void retireHeld();
  /// Keeps arena memory until a later retireHeld() finds that `ended`: no peer may still write into
  /// it. Any thread calls it, one at a time.
  void hold(std::uint64_t offset, std::function<bool()> ended);

  /// Has the keeper thread call `poll` ten times a second, until it returns false or unwatch(). It
  /// must neither wait nor throw. Valid after start().
  void watch(const void* owner, std::function<bool()> poll);
  /// Returns when the owner's poll does not run and will not run again.
  void unwatch(const void* owner);

  /// Marks a clean leave in the arena; also called at exit.
  void markCleanLeave() noexcept;

 private:
  LocalProcess();
  void startKeeper(std::size_t arenaBytes);
  void keep();  // body of the keeper thread
  void wakeKeeper() const;
  /// A connection before its hello.
  struct Caller {
    Descriptor connection;
    TimePoint until;
  };
  using Callers = std::vector<Caller>;
  void serve(Callers& callers, const pollfd* polled);
  void answer(int connection);  // reads one hello, never throws
  bool greet(int connection, const Nonce128& receiver) const;
  std::shared_ptr<PeerProcess> adopt(const Nonce128& nonce, const Descriptor& memory,
                                     std::uint64_t bytes);

  const std::uint64_t forkGeneration_;
  ProcessAddress address_;
  mutable std::mutex mutex_;
  std::shared_ptr<Arena> arena_;
  Descriptor listener_;
  std::atomic<int> listening_{-1};  // the listener, for the keeper
  Descriptor wakeEvent_;
  std::atomic<bool> stopping_{false};
  std::thread keeper_;
  std::map<Nonce128, std::shared_ptr<PeerProcess>> peers_;
  std::map<Nonce128, Descriptor> unanswered_;  // connections without an answer yet
  std::map<std::uint64_t, std::function<bool()>> held_;
  // Guards watches_, and is held while they run. The keeper takes mutex_ in answer(), so a thread
  // that holds mutex_ must not wait for a peer's keeper.
  std::mutex watchMutex_;
  std::map<const void*, std::function<bool()>> watches_;
};

}  // namespace fastcoll
