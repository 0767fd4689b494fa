// Knows of every call of a group on device tensors whether it has ended, and ends the group on all
// ranks when one cannot: one thread a group, from its first call on, which never takes Python's
// lock, for a thread that hangs may hold it.
//
// It asks the events of what is under way, looks at deadlines and at what the library says of
// itself, and hears of faults of other ranks (PeerNews). A fault takes two steps: at once
// everything under way is doomed and the communicators are aborted, on a thread that may hang; and
// when the other ranks have said how far they came, or a while later, all works fail with that
// text.
//
// Its threads keep it alive and are waited for only a moment, so that no hang of a driver, library
// or store keeps a group from being destroyed.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../base/error.hpp"
#include "communicators.hpp"
#include "flight.hpp"
#include "peer_news.hpp"

namespace fastcoll {

struct WatchdogConfig {
  std::string name;  // of the group
  int rank = 0;
  int size = 1;
  /// How often it looks at what is under way.
  Milliseconds tick{100};
  /// Whether a fault that nobody is told of ends the process; and how long the watchdog's thread
  /// may stand still before that does, 0: for ever.
  bool tearsDown = false;
  Milliseconds heartbeat{0};
  /// Called before a fault ends any call; waits for Python's lock no longer than it must.
  std::function<void()> failing = [] {};
};

/// How long a fault's text may take, from when its calls can only fail.
constexpr Milliseconds kLongestVerdict{5000};

class Watchdog : public std::enable_shared_from_this<Watchdog> {
 public:
  /// Told of the group's first fault, on some thread; must not wait for Python.
  using OnFault = std::function<void(ErrorKind, const std::string&)>;

  Watchdog(WatchdogConfig config, std::unique_ptr<KeyValueStore> store,
           std::shared_ptr<Communicators> communicators, OnFault onFault);

  /// Numbers a call and watches it. Throws Error if the group has failed or was closed.
  void enroll(const FlightRef& flight);
  /// Watches it no longer: it did not begin, or was captured into a graph.
  void strike(const FlightRef& flight);
  /// Calls that have ended and still keep tensors, for the caller to free: the watchdog's thread
  /// may not, as that may need Python's lock.
  std::vector<FlightRef> takeEnded();

  /// Ends the group, on all ranks; the first fault counts. `ask`: how far the others came is to be
  /// part of the text. From any thread; does not wait.
  void fail(ErrorKind kind, const std::string& cause, bool ask) noexcept;
  /// Waits for the text of a fault that has begun, at most as long as that takes.
  void waitForVerdict() noexcept;
  bool faulted(ErrorKind* kind = nullptr) const;
  /// Throws Error if there was a fault, or the group was closed.
  void throwIfUnusable(const char* call) const;

  /// Nobody needs to be told any more that the group has failed: it was asked for.
  void waive() { told_->store(true, std::memory_order_relaxed); }
  /// The group's fault, if nobody was told of it yet: results behind it are wrong.
  std::optional<Error> untold() const;

  struct Closed {
    bool quiet = true;               // the library touches no memory any more
    std::exception_ptr interrupted;  // what checkInterrupt() threw meanwhile
  };
  /// Waits until nothing is under way, `grace` at most, and fails the rest. Idempotent.
  Closed close(Milliseconds grace) noexcept;

  std::uint64_t sequence() const;
  std::string prefix(const char* call, std::uint64_t seq) const;

 private:
  enum class Phase { Healthy, Failing, Failed };

  void watch() noexcept;
  void lookAtThread() noexcept;
  void endProcessIfDue() noexcept;
  void look();
  void lookAtFlights();
  void giveVerdict(const std::string& answers);
  void abortCommunicators();
  std::string progress() const;
  void throwIfUnusableLocked(const char* call) const;

  const WatchdogConfig config_;
  const std::shared_ptr<Communicators> communicators_;
  const std::shared_ptr<PeerNews> news_;
  const OnFault onFault_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<FlightRef> flights_;  // in order
  std::vector<FlightRef> ended_;   // and still keeping tensors
  std::uint64_t sequence_ = 0;     // of the last call
  std::uint64_t completed_ = 0;    // of the last whose end was seen
  std::optional<TimePoint> lookingSince_;
  bool watching_ = false;
  bool closing_ = false;
  bool closed_ = false;
  bool aborting_ = false;  // the library has not returned
  Phase phase_ = Phase::Healthy;
  ErrorKind kind_ = ErrorKind::Backend;
  std::string cause_;
  TimePoint verdictBy_;
  TimePoint failedAt_;
  const std::shared_ptr<std::atomic<bool>> told_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace fastcoll
