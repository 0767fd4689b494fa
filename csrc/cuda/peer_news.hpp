// Exchanges fault reports between the ranks of a group through the store. It has a thread of its
// own, because a store may be slow, gone, or written in Python.
//
// Keys begin with the instance of a meeting, because a store may hold keys of an earlier life of
// the group. `<instance>/progress/<rank>` is the progress of a rank. The first fault is written
// under the instance, as on the CPU (group/faults.hpp).
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/store.hpp"
#include "cuda/communicators.hpp"
#include "group/faults.hpp"

namespace fastcoll {

class PeerNews : public std::enable_shared_from_this<PeerNews> {
 public:
  PeerNews(int rank, int size, std::unique_ptr<KeyValueStore> store,
           std::shared_ptr<Communicators> communicators);

  /// Starts the thread, if it does not run. It polls for faults of other ranks and calls `onTick`
  /// once a second: no driver can block this thread. Throws std::system_error.
  void start(std::function<void()> onTick);
  /// The first fault that a rank reported, or "": another rank, unless tell() came first.
  std::string heard() const;
  /// Reports this rank's fault and progress to the others; `cause` is "" in answer to their fault.
  /// Then polls for their progress, at most for `patience`. Returns at once.
  void tell(const std::string& cause, std::string progress, Milliseconds patience);
  /// The answers of the others, as the end of a sentence; nullopt while some may still come.
  std::optional<std::string> answers() const;
  /// The answers received so far, in the same form.
  std::string answersSoFar() const;
  /// Ends the thread. Waits for it at most `grace`, because its store may hang.
  void stop(Milliseconds grace) noexcept;

 private:
  void startLocked();
  void run() noexcept;
  void enqueue(std::function<void()> job);
  std::vector<std::string> faultKeys() const;
  void exchange(const std::string& progress, Milliseconds patience) noexcept;

  const int rank_;
  const int size_;
  const std::shared_ptr<KeyValueStore> store_;  // used by the thread alone
  ErrorChannel errors_;                         // its jobs run on the thread
  const std::shared_ptr<Communicators> communicators_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> onTick_;
  std::deque<std::function<void()>> jobs_;  // that use the store
  bool running_ = false;
  bool closed_ = false;
  std::vector<int> asked_;             // ranks
  std::vector<std::string> progress_;  // of each rank, or ""
  std::string trouble_;                // of the store
  std::atomic<bool> reports_{false};   // a fault of this rank, not of another one
  std::atomic<bool> answered_{false};
};

}  // namespace fastcoll
