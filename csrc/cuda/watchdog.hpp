// Watches all calls of a group on device tensors. If one cannot end, it ends the group on all
// ranks. Two threads of the process call it (watch_threads.hpp), from the first call on. They never
// take the GIL, because a thread that hangs may hold it.
//
// A turn polls the ranks of this host (HostPeers), the events of calls under way, their deadlines,
// the library's errors, and faults of other ranks (PeerNews). A fault takes two steps. At once all
// calls under way are marked as failing and the communicators are aborted, on a thread that may
// hang. When the other ranks have reported their progress, or after a limit, all works fail with
// that text.
//
// The threads keep it alive, and close() waits for them only a moment. So no hang of a driver,
// library or store can block the destruction of a group.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "cuda/communicators.hpp"
#include "cuda/in_flight.hpp"
#include "cuda/peer_news.hpp"
#include "torch/host_peers.hpp"

namespace fastcoll {

struct WatchdogConfig {
  std::string name;  // of the group
  int rank = 0;
  int size = 1;
  /// How often the thread polls the calls under way.
  Milliseconds tick{100};
  /// Whether a fault that no call has raised ends the process. With it: how long the watchdog's
  /// thread may be blocked before that ends the process; 0: for ever.
  bool tearsDown = false;
  Milliseconds heartbeat{0};
  std::shared_ptr<HostPeers> peers;
  /// Called before a fault ends any call. Waits for the GIL no longer than it must.
  std::function<void()> failing = [] {};
};

/// The longest time from InFlightCall::markFailing() to the text of the fault.
constexpr Milliseconds kLongestFailure{5000};

class Watchdog : public std::enable_shared_from_this<Watchdog> {
 public:
  /// Called with the group's first fault, on any thread. Must not wait for Python.
  using OnFault = std::function<void(ErrorKind, const std::string&)>;

  Watchdog(WatchdogConfig config, std::unique_ptr<KeyValueStore> store,
           std::shared_ptr<FaultBell> bell, std::shared_ptr<Communicators> communicators,
           OnFault onFault);

  /// Looks for a fault of the ranks of this host now, instead of in the next turn.
  bool lookAtPeers();
  /// Watches the group from now on; track() does so too.
  void watch();
  /// Numbers a call and watches it. Throws Error if the group has failed or was closed.
  void track(const InFlightRef& flight);
  /// Stops watching a call that did not begin, or was captured into a graph.
  void untrack(const InFlightRef& flight);
  /// Calls that have ended and still keep tensors. The caller frees them: that may need the GIL,
  /// which the watchdog's thread must not take.
  std::vector<InFlightRef> takeEnded();

  /// Ends the group on all ranks; the first fault counts. `ask`: add the progress of the other
  /// ranks to the text. From any thread; does not wait.
  /// `ofPeer`: it is another rank's, so it is told to the others first. It has spoiled no result if
  /// no call is under way; then the next call raises it, and without one it does no harm.
  void fail(ErrorKind kind, const std::string& cause, bool ask, bool ofPeer = false) noexcept;
  /// Waits for the text of a fault under way, until shortly after the text is due.
  void waitForFailure() noexcept;
  bool faulted(ErrorKind* kind = nullptr) const;
  /// Throws Error if there was a fault, or the group was closed.
  void throwIfUnusable(const char* call) const;

  /// The group's failure needs no further report: the program requested it, or gets the error.
  void acknowledge() { reported_->store(true, std::memory_order_relaxed); }
  /// The group's fault, if no call has raised it yet: results after it are wrong.
  std::optional<Error> unreported() const;

  struct Closed {
    bool quiet = true;               // the library touches no memory any more
    std::exception_ptr interrupted;  // what checkInterrupt() threw meanwhile
  };
  /// Waits until no call is under way, at most `grace`, and fails the rest. Idempotent.
  Closed close(Milliseconds grace) noexcept;

  /// One look of the first thread, which a driver may block. Returns when the next one is due.
  Milliseconds turn() noexcept;
  /// One look of the second thread at the first; `blocked`: it does not come back from a turn.
  void check(bool blocked) noexcept;
  /// Reads the store for faults of other ranks. `second`: see FaultBell.
  void readFaults(std::uint64_t second) noexcept { news_->listen(second); }

  std::uint64_t sequence() const;
  ErrorSite site(const char* call, std::uint64_t seq) const;

 private:
  enum class Phase { Healthy, Failing, Failed };

  using Callbacks = std::vector<std::function<void()>>;
  static void collect(InFlightCall& flight, Callbacks& into);
  /// Calls them on another thread, because they run a user's code.
  static void callLater(Callbacks callbacks) noexcept;

  void completeFailureIfDue();
  void endProcessIfDue() noexcept;
  void look();
  void startLocked();
  void pollInFlight();
  void completeFailure(const std::string& answers);
  void abortCommunicators(const std::string& cause);
  std::string progress() const;
  /// How this rank's faults begin where other ranks read them.
  std::string ownHead() const;
  void throwIfUnusableLocked(const char* call) const;

  const WatchdogConfig config_;
  const std::shared_ptr<Communicators> communicators_;
  const std::shared_ptr<PeerNews> news_;
  const OnFault onFault_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<InFlightRef> flights_;  // in order
  std::vector<InFlightRef> ended_;    // ended, still keeping tensors
  std::uint64_t sequence_ = 0;        // of the last call
  std::uint64_t completed_ = 0;       // of the last call whose end was seen
  std::optional<TimePoint> lookingSince_;
  bool watched_ = false;
  bool captures_ = false;  // a graph has calls of the group, and its replays are not seen here
  bool closing_ = false;
  bool closed_ = false;
  bool aborting_ = false;  // the library's abort has not returned
  Phase phase_ = Phase::Healthy;
  ErrorKind kind_ = ErrorKind::Backend;
  std::string cause_;
  TimePoint completeBy_;
  bool asks_ = false;  // the text of the fault waits for the other ranks' progress
  TimePoint failedAt_;
  const std::shared_ptr<std::atomic<bool>> reported_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace fastcoll
