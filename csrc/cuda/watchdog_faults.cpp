// How a fault ends the calls of a group, and how a group closes.
#include <algorithm>
#include <iterator>
#include <utility>

#include "base/interrupt.hpp"
#include "base/log.hpp"
#include "base/thread.hpp"
#include "base/worker_pool.hpp"
#include "cuda/capture.hpp"
#include "cuda/watch_threads.hpp"
#include "cuda/watchdog.hpp"

namespace fastcoll {
namespace {

// How long the rank that met a fault waits for the progress of the others.
constexpr Milliseconds kAnswer{2500};
// How long close() waits for the library's abort, and for the threads.
constexpr Milliseconds kTelling{500};  // for the store, to take a report
constexpr Milliseconds kAbort{2000};
constexpr Milliseconds kThreads{200};
constexpr Milliseconds kSlice{50};
constexpr Milliseconds kLongest = std::chrono::hours(24 * 365);

bool endsSentence(const std::string& text) {
  return !text.empty() && text.back() == '.';
}

std::string withRemedy(ErrorKind kind, const std::string& text) {
  if (endsSentence(text)) return text;
  return kind == ErrorKind::Timeout ? concat(text, kFindDelay)
                                    : concat(text, ". Read the logs of all ranks.");
}

}  // namespace

void Watchdog::collect(InFlightCall& flight, Callbacks& into) {
  auto callbacks = flight.seen();
  std::move(callbacks.begin(), callbacks.end(), std::back_inserter(into));
}

void Watchdog::callLater(Callbacks callbacks) noexcept {
  if (callbacks.empty()) return;
  try {
    runOnWorker([callbacks = std::move(callbacks)] {
      for (const auto& callback : callbacks) callback();
    });
  } catch (const std::exception& error) {
    log(LogLevel::Warn,
        concat("no thread could be started to call back: ", error.what(), kMoreThreads));
  }
}

/// Called under the lock.
std::string Watchdog::progress() const {
  return concat(completed_, " ", sequence_, " ",
                flights_.empty() ? "nothing" : flights_.front()->describe());
}

void Watchdog::fail(ErrorKind kind, const std::string& cause, bool ask, bool ofPeer) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (phase_ != Phase::Healthy || closed_) return;
  }
  config_.failing();
  try {
    // The rank that reports a fault first adds the progress of all. The others answer it, but do
    // not wait for answers: a rank that has ended sends none.
    const std::string heard = news_->heard();
    const bool theirs = !heard.empty() && ask;
    ask = ask && !theirs;
    bool tells = ask || theirs || ofPeer;
    std::string came;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (phase_ != Phase::Healthy || closed_) return;
      phase_ = Phase::Failing;
      if (ofPeer && flights_.empty() && !captures_) acknowledge();
      kind_ = kind;
      cause_ = cause;
      asks_ = ask;
      completeBy_ = Clock::now() + (ask ? kAnswer : Milliseconds(0)) + kTelling;
      came = progress();
      for (const InFlightRef& flight : flights_) flight->markFailing();
      aborting_ = true;
      changed_.notify_all();
    }
    wakeWatching();
    const std::string told = theirs ? heard : ownHead() + withRemedy(kind, cause);
    config_.peers->record({kind, told});
    log(LogLevel::Warn, concat("group '", config_.name, "', rank ", config_.rank, "/", config_.size,
                               ": the group is aborted: ", withRemedy(kind, cause)));
    communicators_->beginAbort(told);  // even if no thread can be started
    try {
      abortCommunicators(told);
    } catch (const std::exception& error) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        aborting_ = false;
        changed_.notify_all();
      }
      log(LogLevel::Warn,
          concat("no thread could be started for the abort: ", error.what(), kMoreThreads));
    }
    if (!communicators_->domains().empty()) {
      news_->tell(theirs ? "" : cause, came, ask ? kAnswer : Milliseconds(0));
    } else {
      tells = false;  // there is no rank to ask or tell
    }
    // A call that raises may end the process: what other hosts must hear is written first.
    if (!tells) completeFailure("");
    if (onFault_) onFault_(kind, told);
  } catch (const std::exception& error) {
    log(LogLevel::Warn, concat("group '", config_.name, "', rank ", config_.rank,
                               ": the abort itself failed: ", error.what()));
    completeFailure("");
  }
}

/// Aborts on a detached thread, because the library's abort may hang. The library finds its devices
/// itself.
void Watchdog::abortCommunicators(const std::string& cause) {
  startThread([self = shared_from_this(), cause] {
    ::pthread_setname_np(::pthread_self(), "fastcoll-abort");
    const RelaxedCapture relaxed;
    self->communicators_->abortAll(cause);
    const std::lock_guard<std::mutex> lock(self->mutex_);
    self->aborting_ = false;
    self->changed_.notify_all();
  }).detach();
}

void Watchdog::completeFailure(const std::string& answers) {
  Callbacks callbacks;
  std::vector<std::pair<std::vector<trace::RecordId>, std::exception_ptr>> traces;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (phase_ != Phase::Failing) return;
    phase_ = Phase::Failed;
    failedAt_ = Clock::now();
    // Join the sentences, with the remedy at the end.
    if (!answers.empty() && answers.front() == '.') cause_ = withoutFullStop(cause_);
    cause_ += answers;
    cause_ = withRemedy(kind_, cause_);
    for (const InFlightRef& flight : flights_) {
      const auto error =
          std::make_exception_ptr(Error(kind_, site(flight->call, flight->seq), cause_));
      flight->fail(error, reported_);
      traces.emplace_back(flight->traces, error);
      collect(*flight, callbacks);
      if (flight->hasStash()) ended_.push_back(flight);
    }
    flights_.clear();
    changed_.notify_all();
  }
  for (const auto& [ids, error] : traces) {  // without the lock: it may write a file
    for (const auto id : ids) trace::fail(id, error);
  }
  callLater(std::move(callbacks));
}

void Watchdog::waitForFailure() noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_until(lock, completeBy_ + Milliseconds(500),
                      [this] { return phase_ != Phase::Failing; });
}

std::optional<Error> Watchdog::unreported() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (phase_ == Phase::Healthy || reported_->load(std::memory_order_relaxed)) return std::nullopt;
  return Error(kind_, site("shutdown", sequence_),
               "the group failed before it was destroyed, and what was computed from "
               "its results since is wrong: ",
               cause_);
}

Watchdog::Closed Watchdog::close(Milliseconds grace) noexcept {
  Closed closed;
  std::unique_lock<std::mutex> lock(mutex_);
  if (closed_) return {!aborting_, nullptr};
  closing_ = true;
  changed_.notify_all();
  wakeWatching();
  const auto until = deadlineAfter(Clock::now(), std::min(grace, kLongest));
  while (!flights_.empty() && Clock::now() < until && !closed.interrupted) {
    changed_.wait_for(lock, kSlice, [this] { return flights_.empty(); });
    lock.unlock();
    try {
      checkInterrupt();
    } catch (...) {
      closed.interrupted = std::current_exception();
    }
    lock.lock();
  }
  const bool pending = !flights_.empty() && phase_ == Phase::Healthy;
  lock.unlock();
  if (pending) {
    acknowledge();
    fail(ErrorKind::Backend,
         "the group was destroyed while a call was running. Wait for all work before you destroy a "
         "group.",
         false);
  }
  completeFailure(news_->answersSoFar());  // if one is still due: no more answers are awaited
  lock.lock();
  changed_.wait_for(lock, kAbort, [this] { return !aborting_; });
  closed_ = true;
  changed_.notify_all();
  closed.quiet = !aborting_;
  lock.unlock();
  stopWatching(shared_from_this(), kThreads);
  news_->stop(kThreads);
  return closed;
}

}  // namespace fastcoll
