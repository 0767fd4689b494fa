// The communicators of a group. Calls on them, polls for errors and aborts by the watchdog need no
// GIL, because another thread may hold it for ever.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/kernel_words.hpp"
#include "cuda/nccl.hpp"

namespace fastcoll {

/// Where ranks report faults to each other.
struct FaultDomain {
  std::string instance;  // equal on these ranks, unique to this life of the group
  int peer = -1;         // the other rank of a pair; -1: the whole group
};

/// Groups whose communicators share NCCL's resources (splitShare). NCCL allows one thread at a time
/// to call any of these communicators, and an abort of one ends the kernels of all. So one lock
/// serves all groups, and if one group is aborted, the others fail. A group is alone at first.
class Family {
 public:
  std::timed_mutex calling;
  std::timed_mutex aborting;
  /// The first cause counts.
  void end(const std::string& cause) noexcept;
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  std::string cause() const;

 private:
  std::atomic<bool> ended_{false};
  mutable std::mutex mutex_;
  std::string cause_;
};

/// Device memory that a communicator has, as the library counts it.
struct CommunicatorMemory {
  std::string name;         // as in add()
  std::int64_t bytes = -1;  // of its whole family; -1: this library does not count
};

class Communicators {
 public:
  /// `group`: its name, for messages.
  explicit Communicators(std::string group = "");
  /// Makes the group one of another's family. Call before its first communicator.
  void join(Communicators& other);
  /// Fails all groups of the family.
  void endFamily(const std::string& cause) noexcept { family()->end(cause); }
  /// The family; equal for all its groups.
  std::shared_ptr<Family> family() const;
  /// Why the family has ended, if this group has not aborted its own communicators yet; else "".
  std::string familyFault() const;
  /// Adds the communicator of a device, or of a pair of ranks on it (`peer` as in FaultDomain).
  /// `name` appears in messages. False after abortAll(): the caller must then abort it.
  bool add(std::shared_ptr<NcclCalls> calls, int device, std::string name, std::string instance,
           int peer);
  /// Call before the owner ends it. False if it was aborted: do not touch it then.
  bool remove(const std::shared_ptr<NcclCalls>& calls);
  /// The calls of one communicator; nullptr if there is none, or it was aborted.
  std::shared_ptr<NcclCalls> find(int device, int peer) const;
  /// Adds kernels between ranks, whose waits end with the communicators.
  void addKernels(KernelWords words);
  bool hasKernels() const { return hasKernels_.load(std::memory_order_relaxed); }
  /// The first step of abortAll(): ends the waits of kernels, and fails the other groups of the
  /// family. add() and aborted() report the abort from now on. Needs neither the library nor the
  /// driver.
  void beginAbort(const std::string& cause) noexcept;
  /// Aborts all communicators. Returns when the library does, which may be never.
  void abortAll(const std::string& cause) noexcept;
  /// Hold it while making calls. An abort waits for it a moment, so it frees nothing between two
  /// calls of a group. It waits no longer, so it can end a call that hangs.
  std::timed_mutex& calling() { return family()->calling; }
  bool aborted() const {
    return aborted_.load(std::memory_order_acquire) ||
           now_.load(std::memory_order_acquire)->ended();
  }
  /// Why the group or its family was aborted; "" if it was not.
  std::string abortCause() const;
  /// The first error that a kernel or the library reports, or "".
  std::string asyncError();
  std::vector<CommunicatorMemory> memory() const;
  /// The domains of all communicators ever added.
  std::vector<FaultDomain> domains() const;

 private:
  struct One {
    std::shared_ptr<NcclCalls> calls;
    int device;
    int peer;
    std::string name;
  };
  /// The first fault that a kernel reports, or "".
  std::string kernelError();

  std::atomic<bool> aborted_{false};
  std::atomic<bool> hasKernels_{false};
  const std::string group_;
  std::vector<std::shared_ptr<Family>> families_;  // the last one counts; a lock may be of another
  std::atomic<Family*> now_;                       // the last one
  mutable std::mutex mutex_;  // never held during a library call, which may hang
  std::vector<One> all_;
  std::string abortCause_;
  std::vector<KernelWords> kernels_;
  mutable std::mutex asking_;  // taken before mutex_: no communicator ends while it is polled
  mutable std::mutex domainsMutex_;
  std::vector<FaultDomain> domains_;
};

}  // namespace fastcoll
