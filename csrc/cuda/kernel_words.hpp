// Words of host memory through which the host and the kernels between ranks signal to each other,
// for one region. The device maps them, so neither side needs a driver call or the GIL. The device
// side is kernels/_signals.py.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

namespace fastcoll {

/// The processes of the other ranks, which are on this host. Without pidfds (before Linux 5.3, or
/// in a sandbox) no end is seen.
class PeerProcesses {
 public:
  /// `pids`: by rank, in this process's pid namespace.
  explicit PeerProcesses(const std::map<int, pid_t>& pids);
  ~PeerProcesses();
  PeerProcesses(const PeerProcesses&) = delete;
  PeerProcesses& operator=(const PeerProcesses&) = delete;
  /// "rank 1 (process 4242 of this host) has ended", for the first such rank, or "".
  std::string ended() const;

 private:
  const std::map<int, pid_t> pids_;
  std::map<int, int> descriptors_;  // by rank; -1: it had ended before
};

class KernelWords {
 public:
  /// `memory` owns two words. The first one ends the waits of kernels. In the second one, a kernel
  /// that timed out reports what it waited for. `prefix` begins the messages; `size`: ranks of the
  /// group.
  KernelWords(std::shared_ptr<std::int64_t> memory, std::string prefix, int size,
              std::shared_ptr<const PeerProcesses> processes)
      : words_(std::move(memory)),
        prefix_(std::move(prefix)),
        size_(size),
        processes_(std::move(processes)) {}

  /// Ends all waits, current and future.
  void endWaits() noexcept { __atomic_store_n(words_.get(), 1, __ATOMIC_RELEASE); }
  /// What a kernel waited for in vain, or "". When a peer's process has ended, ends all waits
  /// first: a kernel that waits for it gives up, and one that has all that it waits for does not.
  std::string fault();

 private:
  std::shared_ptr<std::int64_t> words_;
  std::string prefix_;
  int size_;
  std::shared_ptr<const PeerProcesses> processes_;
  std::string gone_;  // the first peer that has ended
};

}  // namespace fastcoll
