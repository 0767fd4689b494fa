// How the ranks of a group tell each other of faults: through the store, on a thread of its own,
// for a store may be slow, gone, or written in Python.
//
// Keys begin with the instance of a meeting, since a store may hold those of an earlier life of the
// group. `<instance>/progress/<rank>` is how far a rank came; the first fault is told as on the CPU
// (group/told_fault.hpp), under the instance.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../base/clock.hpp"
#include "../base/store.hpp"
#include "communicators.hpp"

namespace fastcoll {

class PeerNews : public std::enable_shared_from_this<PeerNews> {
 public:
  PeerNews(int rank, int size, std::unique_ptr<KeyValueStore> store,
           std::shared_ptr<Communicators> communicators);

  /// Starts to look for faults of other ranks, if it has not, and calls `onTick` once a second:
  /// this is the thread that no driver can hold up. Throws std::system_error.
  void start(std::function<void()> onTick);
  /// The first fault that another rank told, or "".
  std::string heard() const;
  /// Tells the others of a fault of this rank, or answers to theirs (`cause` is ""), and how far
  /// this rank came; and asks them, for `patience`. Returns at once.
  void tell(std::string cause, std::string progress, Milliseconds patience);
  /// What the others have answered, as the end of a sentence; nullopt while some still may.
  std::optional<std::string> answers() const;
  /// What is known of the others by now, in the same form.
  std::string answersSoFar() const;
  /// Lets the thread end; waits for it no longer than `grace`, as its store may hang.
  void stop(Milliseconds grace) noexcept;

 private:
  struct Telling {
    std::string cause;
    std::string progress;
    Milliseconds patience{};
  };
  void startLocked();
  void run() noexcept;
  void look();
  void announce(const Telling& telling);
  void ask(const Telling& telling);
  std::string sentence() const;

  const int rank_;
  const int size_;
  const std::unique_ptr<KeyValueStore> store_;  // used by the thread alone
  const std::shared_ptr<Communicators> communicators_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> onTick_;
  int failures_ = 0;  // of the store, one after the other
  bool running_ = false;
  bool closed_ = false;
  std::string heard_;
  std::optional<Telling> telling_;
  std::vector<int> asked_;             // ranks
  std::vector<std::string> progress_;  // of each rank, or ""
  std::string first_;                  // the fault that another rank had told before this one
  std::string trouble_;                // of the store
  bool answered_ = false;
};

}  // namespace fastcoll
