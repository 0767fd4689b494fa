// Exchanges fault reports between the ranks of a group through the store, on threads of fastcoll,
// because a store may be slow, gone, or written in Python.
//
// Keys begin with the instance of a domain, because a store may hold keys of an earlier life of
// the group. `<instance>/progress/<rank>` is the progress of a rank. The first fault is written
// under the instance, as on the CPU (group/faults.hpp).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/store.hpp"
#include "cuda/communicators.hpp"
#include "cuda/fault_bell.hpp"

namespace fastcoll {

class PeerNews : public std::enable_shared_from_this<PeerNews> {
 public:
  /// `store`: the group's. `bell`: rung after each report of any group.
  PeerNews(int rank, int size, std::unique_ptr<KeyValueStore> store,
           std::shared_ptr<FaultBell> bell, std::shared_ptr<Communicators> communicators);

  /// Reads the store for a fault of another rank, if the bell has rung. `second`: see FaultBell.
  void listen(std::uint64_t second) noexcept;
  /// Takes over a fault that another rank has reported in another way.
  void hear(const std::string& fault);
  /// The first fault that a rank reported, or "": another rank, unless tell() came first.
  std::string heard() const;
  /// Reports this rank's fault and progress to the others; `cause` is "" in answer to their fault.
  /// Then polls for their progress, at most for `patience`. Called once. Returns at once: a thread
  /// does it. Throws std::system_error.
  void tell(const std::string& cause, std::string progress, Milliseconds patience);
  /// The answers of the others, as the end of a sentence; nullopt while some may still come.
  std::optional<std::string> answers() const;
  /// The answers received so far, in the same form.
  std::string answersSoFar() const;
  /// Waits for the end of tell(), at most `grace`, because the store may hang.
  void stop(Milliseconds grace) noexcept;

 private:
  std::vector<std::string> faultKeys() const;
  void report(std::string first) noexcept;
  void exchange(const std::string& progress, Milliseconds patience) noexcept;

  const int rank_;
  const int size_;
  const std::unique_ptr<KeyValueStore> store_;
  const std::shared_ptr<FaultBell> bell_;
  const std::shared_ptr<Communicators> communicators_;
  std::pair<std::uint64_t, std::size_t> listened_;  // the rings and the number of keys it has read

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<std::string> first_;  // fault
  bool telling_ = false;
  std::vector<int> asked_;             // ranks
  std::vector<std::string> progress_;  // of each rank, or ""
  std::string trouble_;                // of the store
  std::atomic<bool> reports_{false};   // a fault of this rank, not of another one
  std::atomic<bool> answered_{false};
};

}  // namespace fastcoll
