// The communicators of a group. Calls on them, polls for errors and aborts by the watchdog need no
// GIL, because another thread may hold it for ever.
#pragma once

#include <atomic>
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

class Communicators {
 public:
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
  /// Ends the waits of kernels and aborts all communicators. Returns when the library does, which
  /// may be never. add() and aborted() report the abort at once.
  void abortAll() noexcept;
  /// The first step of abortAll(): ends the waits of kernels. Needs neither the library nor the
  /// driver.
  void endWaits() noexcept;
  /// Hold it while making calls. An abort waits for it a moment, so it frees nothing between two
  /// calls of a group. It waits no longer, so it can end a call that hangs.
  std::timed_mutex& calling() { return calling_; }
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  /// The first error that a kernel or the library reports, or "".
  std::string asyncError();
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
  std::timed_mutex calling_;
  mutable std::mutex mutex_;  // never held during a library call, which may hang
  std::vector<One> all_;
  std::vector<KernelWords> kernels_;
  mutable std::mutex asking_;  // taken before mutex_: no communicator ends while it is polled
  mutable std::mutex domainsMutex_;
  std::vector<FaultDomain> domains_;
};

}  // namespace fastcoll
