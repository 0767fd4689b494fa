// The communicators of a group, so that calls are made on them, and the watchdog can ask for errors
// and abort them, while another thread holds Python's lock for ever.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernel_words.hpp"
#include "nccl.hpp"

namespace fastcoll {

/// Where ranks can tell each other of faults.
struct Meeting {
  std::string instance;  // equal on these ranks for this life of the group, and at no other time
  int peer = -1;         // the one other rank; -1: all of the group
};

class Communicators {
 public:
  /// Takes the communicator of a device, or of a pair of ranks on it (`peer` as in Meeting); `name`
  /// is for messages. False after abortAll(): then it is the caller's to abort.
  bool add(std::shared_ptr<NcclCalls> calls, int device, std::string name, std::string instance,
           int peer);
  /// Called before the owner ends it; false when it was aborted, so that it must not be touched.
  bool remove(const std::shared_ptr<NcclCalls>& calls);
  /// The calls of one of them; nullptr: there is none, or it was aborted.
  std::shared_ptr<NcclCalls> find(int device, int peer) const;
  /// Kernels between ranks that are to end with the communicators.
  void addKernels(KernelWords words);
  bool hasKernels() const { return hasKernels_.load(std::memory_order_relaxed); }
  /// Ends waits of kernels, aborts all, and returns when the library does, which may be never.
  /// Those who add later, or look at aborted(), know at once.
  void abortAll() noexcept;
  /// The first step of it, which needs neither the library nor the driver: kernels stop to wait.
  void endWaits() noexcept;
  /// Held while calls are made on them: an abort waits for it a moment, so that it frees nothing
  /// between two calls of a group, and no longer, so that it ends one that hangs.
  std::timed_mutex& calling() { return calling_; }
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  /// What a kernel, or the library, reports of one of them, or "".
  std::string asyncError() const;
  /// The meetings of all that were ever added.
  std::vector<Meeting> meetings() const;

 private:
  struct One {
    std::shared_ptr<NcclCalls> calls;
    int device;
    int peer;
    std::string name;
  };
  /// What kernels say, or "".
  std::string kernelError() const;

  std::atomic<bool> aborted_{false};
  std::atomic<bool> hasKernels_{false};
  std::timed_mutex calling_;
  mutable std::mutex mutex_;  // never held while the library is asked, which may hang
  std::vector<One> all_;
  std::vector<KernelWords> kernels_;
  mutable std::mutex asking_;  // before mutex_: none is ended while it is asked
  mutable std::mutex meetingsMutex_;
  std::vector<Meeting> meetings_;
};

}  // namespace fastcoll
