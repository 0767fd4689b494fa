#include "cuda/watchdog.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <unordered_map>
#include <utility>

#include "base/log.hpp"
#include "cuda/watch_threads.hpp"

namespace fastcoll {
namespace {

// Between two polls: while a thread waits for one, and while no call is under way.
constexpr Milliseconds kSoon{10};
constexpr Milliseconds kIdle{500};
constexpr char kTheirs[] = "another rank met a fault: ";
// How long the program has to meet a fault in a call of its own.
constexpr Milliseconds kUnreported{1000};

std::string textOf(const std::exception& error) {
  const auto* torch = dynamic_cast<const c10::Error*>(&error);
  return torch != nullptr ? torch->what_without_backtrace() : error.what();
}

}  // namespace

Watchdog::Watchdog(WatchdogConfig config, std::unique_ptr<KeyValueStore> store,
                   std::shared_ptr<FaultBell> bell, std::shared_ptr<Communicators> communicators,
                   OnFault onFault)
    : config_(std::move(config)),
      communicators_(std::move(communicators)),
      news_(std::make_shared<PeerNews>(config_.rank, config_.size, std::move(store),
                                       std::move(bell), communicators_)),
      onFault_(std::move(onFault)) {}

ErrorSite Watchdog::site(const char* call, std::uint64_t seq) const {
  return errorSite(call, config_, seq);
}

void Watchdog::throwIfUnusableLocked(const char* call) const {
  if (phase_ != Phase::Healthy) {
    reported_->store(true, std::memory_order_relaxed);
    throw Error(kind_, site(call, sequence_ + 1), "the group failed before: ", cause_);
  }
  if (closing_) {
    throw Error(ErrorKind::Backend, site(call, sequence_ + 1), "the group was destroyed",
                kInitAgain);
  }
}

void Watchdog::throwIfUnusable(const char* call) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  throwIfUnusableLocked(call);
}

// --- calls ---------------------------------------------------------------------------------------

void Watchdog::startLocked() {
  if (watched_) return;
  startWatching(shared_from_this());
  watched_ = true;
}

void Watchdog::watch() {
  const std::lock_guard<std::mutex> lock(mutex_);
  throwIfUnusableLocked("init");
  startLocked();
}

void Watchdog::track(const InFlightRef& flight) {
  const std::lock_guard<std::mutex> lock(mutex_);
  throwIfUnusableLocked(flight->call);
  startLocked();
  flight->seq = ++sequence_;
  flight->launched = Clock::now();
  flight->deadline = deadlineAfter(flight->launched, flight->timeout);
  flights_.push_back(flight);
  if (flights_.size() == 1) wakeWatching();
}

void Watchdog::untrack(const InFlightRef& flight) {
  const std::lock_guard<std::mutex> lock(mutex_);
  captures_ = captures_ || flight->captured();
  flights_.erase(std::remove(flights_.begin(), flights_.end(), flight), flights_.end());
}

std::vector<InFlightRef> Watchdog::takeEnded() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(ended_, {});
}

std::uint64_t Watchdog::sequence() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sequence_;
}

std::string Watchdog::ownHead() const {
  return concat("rank ", config_.rank, ": ");
}

bool Watchdog::faulted(ErrorKind* kind) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (phase_ == Phase::Healthy) return false;
  if (kind != nullptr) *kind = kind_;
  return true;
}

// --- the threads ---------------------------------------------------------------------------------

Milliseconds Watchdog::turn() noexcept {
  endProcessIfDue();
  std::unique_lock<std::mutex> lock(mutex_);
  const Phase phase = phase_;
  lock.unlock();
  if (phase == Phase::Healthy) {
    look();
  } else {
    completeFailureIfDue();
  }
  lock.lock();
  if (phase_ == Phase::Failing || closing_) return kSoon;
  const bool idle = flights_.empty() && phase_ == Phase::Healthy && !communicators_->hasKernels();
  return idle ? kIdle : config_.tick;
}

void Watchdog::check(bool blocked) noexcept {
  endProcessIfDue();
  completeFailureIfDue();
  if (!blocked || lookAtPeers()) return;
  std::string late;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (phase_ != Phase::Healthy) return;
    const auto now = Clock::now();
    for (const InFlightRef& flight : flights_) {
      if (now < flight->deadline) continue;
      late = concat(flight->describe(), " timed out after ", flight->timeout.count(),
                    " ms, and the CUDA driver does not respond");
      break;
    }
  }
  if (!late.empty()) fail(ErrorKind::Timeout, late, false);
}

void Watchdog::completeFailureIfDue() {
  bool late = false;
  bool asks = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (phase_ != Phase::Failing) return;
    late = Clock::now() >= completeBy_;
    asks = asks_;
  }
  const auto answers = late ? news_->answersSoFar() : news_->answers();
  if (answers) completeFailure(asks ? *answers : "");
}

/// Ends the process if no call has raised the fault, as torch's own NCCL backend does. Otherwise
/// the program would compute from missing results, or wait for a device for ever. Called on both
/// threads, because a driver may block the watchdog's.
void Watchdog::endProcessIfDue() noexcept {
  std::string why;
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!config_.tearsDown || closing_) return;
    const auto now = Clock::now();
    const bool reported = reported_->load(std::memory_order_relaxed);
    if (phase_ == Phase::Failed && !reported && now >= failedAt_ + kUnreported) {
      why = concat(cause_, !cause_.empty() && cause_.back() == '.' ? " " : ". ",
                   "The error was not raised in Python within 1 s");
    } else if (config_.heartbeat.count() > 0 && lookingSince_ &&
               now >= *lookingSince_ + config_.heartbeat) {
      why =
          concat("the watchdog has waited ", config_.heartbeat.count(), " ms for the CUDA driver");
    } else {
      return;
    }
  } catch (const std::exception&) {
    return;
  }
  try {
    const std::string text =
        concat("[fastcoll] group '", config_.name, "', rank ", config_.rank, "/", config_.size,
               ": aborting the process: ", why,
               ", and results may be wrong. Set FASTCOLL_ERROR_HANDLING=raise to get an exception "
               "from the group's next call instead.\n");
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
    if (trace::isWatching()) trace::write(why);
  } catch (const std::exception& error) {
    log(LogLevel::Warn, concat("the trace was not written: ", error.what()));
  }
  std::abort();
}

bool Watchdog::lookAtPeers() {
  const bool aborted = config_.peers->aborted();
  UnderWay call;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (phase_ != Phase::Healthy || (closing_ && !aborted)) return aborted;
    const auto numbered = [](const InFlightRef& flight) { return flight->number != 0; };
    auto first = std::find_if(flights_.begin(), flights_.end(), numbered);
    if (first == flights_.end()) first = flights_.begin();
    if (!flights_.empty()) call = {(*first)->describe(), (*first)->number, (*first)->launched};
  }
  const auto found = config_.peers->look(call);
  const bool ofPeer = !found || !found->mismatch;
  if (aborted) {
    const auto [kind, text, when] = config_.peers->recorded();
    const bool theirs = text.rfind("rank ", 0) == 0 && text.rfind(ownHead(), 0) != 0;
    if (theirs) news_->hear(text);
    fail(kind, concat(theirs ? kTheirs : "a call on CPU tensors has failed: ", text), theirs,
         theirs && ofPeer);
    return true;
  }
  if (found) fail(found->fault.kind, found->fault.text, false, ofPeer);
  return found.has_value();
}

void Watchdog::look() {
  if (lookAtPeers()) return;
  const auto note = [this](std::optional<TimePoint> since) {
    const std::lock_guard<std::mutex> lock(mutex_);
    lookingSince_ = since;
  };
  note(Clock::now());
  try {
    pollInFlight();
  } catch (const std::exception& error) {
    note(std::nullopt);
    // The device itself reports an error, of a kernel or of the GPU.
    return fail(ErrorKind::Backend, "the device reported an error: " + textOf(error), false);
  }
  const std::string fault = communicators_->asyncError();
  note(std::nullopt);
  if (!fault.empty()) return fail(ErrorKind::Backend, fault, true);
  const std::string heard = news_->heard();
  if (!heard.empty()) fail(ErrorKind::Backend, kTheirs + heard, true, true);
}

/// Queries events without the lock, because a driver may hang. Calls on a stream end in order, so a
/// few queries find the first that has not ended.
void Watchdog::pollInFlight() {
  std::unordered_map<c10::Stream, std::vector<InFlightRef>> streams;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const InFlightRef& flight : flights_) streams[*flight->stream].push_back(flight);
  }
  if (streams.empty()) return;
  std::string timedOut;
  std::string absent;
  Milliseconds limit{};
  {
    // Without a current device the thread would open the first one.
    const c10::DeviceGuard onDevice(streams.begin()->first.device());
    const c10::impl::VirtualGuardImpl impl(streams.begin()->first.device_type());
    const auto now = Clock::now();
    const InFlightCall* late = nullptr;
    for (const auto& [stream, flights] : streams) {
      impl.setDevice(stream.device());
      const auto running =
          std::partition_point(flights.begin(), flights.end(),
                               [](const InFlightRef& flight) { return flight->ended(); });
      std::for_each(flights.begin(), running, [](const InFlightRef& flight) { flight->pass(); });
      std::for_each(running, flights.end(), [&](const InFlightRef& flight) {
        if (now < flight->deadline || (late != nullptr && late->seq < flight->seq)) return;
        late = flight.get();
      });
    }
    if (late != nullptr) {
      timedOut = late->describe();
      limit = late->timeout;
      absent = config_.peers->late(late->number);
    }
  }
  Callbacks callbacks;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto over = [&](const InFlightRef& flight) {
      if (!flight->passed()) return false;
      completed_ = std::max(completed_, flight->seq);
      collect(*flight, callbacks);
      flight->traceEnd();
      if (flight->hasStash()) ended_.push_back(flight);
      return true;
    };
    flights_.erase(std::remove_if(flights_.begin(), flights_.end(), over), flights_.end());
    const auto bySeq = [](const InFlightRef& a, const InFlightRef& b) { return a->seq < b->seq; };
    for (auto& [stream, flights] : streams) {
      for (InFlightRef& flight : flights) {
        // Also struck calls: this thread may hold the last reference.
        if (flight->passed() || !flight->hasStash() ||
            std::binary_search(flights_.begin(), flights_.end(), flight, bySeq)) {
          continue;
        }
        ended_.push_back(std::move(flight));
      }
    }
    streams.clear();  // under the lock, while ended_ holds them: this thread frees no tensors
    if (flights_.empty()) changed_.notify_all();
  }
  callLater(std::move(callbacks));
  if (!timedOut.empty()) {
    fail(ErrorKind::Timeout, concat(timedOut, " timed out after ", limit.count(), " ms", absent),
         true);
  }
}

}  // namespace fastcoll
