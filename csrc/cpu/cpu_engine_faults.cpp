// How a group fails on this rank, and on the ranks that share no memory with it.
#include <mutex>
#include <thread>

#include "base/fork.hpp"
#include "base/log.hpp"
#include "base/worker_pool.hpp"
#include "cpu/cpu_engine.hpp"

namespace fastcoll {
namespace {

// Limit on one write to, or read from, the store. A reachable store needs less than 1 ms.
constexpr Milliseconds kTelling{100};
// Time for the first rank that detects a fault to write it, and for the kernel to end a process.
constexpr Milliseconds kWhoBroke{500};

}  // namespace

void CpuEngine::failing() noexcept {
  if (config_.abortHooks != nullptr) config_.abortHooks->call();
}

Fault CpuEngine::publish(const Fault& fault) noexcept {
  if (rendezvous_ == nullptr) return fault;
  try {
    return errors_.publish(rendezvous_->faultKeys(), fault, kTelling);
  } catch (const std::exception&) {
    return fault;
  }
}

void CpuEngine::throwIfPublished(const ErrorSite& site) {
  if (const auto fault = errors_.check({rendezvous_->faultKeys()[0]}, Milliseconds(0))) {
    throw Error(fault->kind, site, fault->text);
  }
}

Fault CpuEngine::explain(int peer, const std::string& text) noexcept {
  const bool known = peer >= 0;
  Fault fault{ErrorKind::Backend, known ? brokeOff(memory_->memberName(peer), text) : text};
  try {
    const auto began = Clock::now(), until = began + (known ? kTelling : kWhoBroke);
    const std::string key = known ? rendezvous_->faultKeyOf(peer) : rendezvous_->faultKeys()[0];
    while (Clock::now() < until) {
      if (auto first = errors_.check({key}, Milliseconds(20))) return *first;
      std::string ended;
      if (known) {
        if (rendezvous_->hasEnded(peer)) ended = memory_->memberName(peer);
      } else if (Clock::now() >= began + kTelling) {
        // An ended process may have sent a close notice before, so its peers had time to publish.
        ended = rendezvous_->endedProcesses();
      }
      if (!ended.empty()) {
        // It may have published a fault before. The first answer may be of a read that began before
        // this call, so read twice.
        for (int read = 0; read < 2; ++read) {
          if (auto first = errors_.check({key}, kTelling)) return *first;
        }
        fault.text = concat(ended, ": connection closed by peer (process died)",
                            known ? kReadLog : "; " + text);
        break;
      }
      std::this_thread::sleep_for(Milliseconds(5));
    }
  } catch (const std::exception&) {
  }
  return fault;
}

/// Fails the group with this rank's fault. Returns the error of that fault, or of the one that came
/// first.
Error CpuEngine::failHere(const Request& request, const Error& error) {
  Fault fault{error.kind(), error.cause()};
  const std::string own = fault.text;
  if (isUnexplained(error)) fault = explain(-1, own);
  abort(fault.kind, fault.text);
  takeConnectionsBack();
  const Path path = path_.load(std::memory_order_acquire);
  if (path == Path::Undecided || path == Path::MultiHost) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (fault_) fault = *fault_;
  }
  // The late rank's own error is more precise than the others' error.
  const bool late = dynamic_cast<const Rendezvous::CameLate*>(&error) != nullptr;
  if (late || fault.text == own) return error;
  return Error(fault.kind, errorSite(collectiveName(request.collective), config_, request.seq),
               fault.text);
}

/// nullptr: there is none yet.
PointToPoint* CpuEngine::pointToPointSoFar() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return pointToPoint_.get();
}

/// Called after a collective and its group have failed, before the caller gets the error.
void CpuEngine::takeConnectionsBack() noexcept {
  if (PointToPoint* const made = pointToPointSoFar()) made->giveBack();
}

void CpuEngine::abort(ErrorKind kind, const std::string& cause) noexcept {
  if (forkGeneration_ != forkGeneration()) return;  // a forked child has no part in the group
  failing();
  try {
    Fault fault{kind, cause};
    // Shared memory notifies only the ranks of this host.
    const Path path = path_.load(std::memory_order_acquire);
    bool told = path == Path::Shared || (path != Path::MultiHost && faulted());
    if (path == Path::MultiHost) {
      const std::lock_guard<std::mutex> lock(mutex_);
      told = fault_.has_value();
    }
    if (!told) fault = publish(fault);
    if (memory_ != nullptr) memory_->abort(fault.kind, fault.text);
    if (rendezvous_ != nullptr) rendezvous_->cancel();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!fault_) fault_ = fault;
      state_ |= kCheck;
      changed_.notify_all();
    }
    if (PointToPoint* const made = pointToPointSoFar()) made->failAll();
  } catch (...) {
    log(LogLevel::Warn, "group '", config_.name, "': the abort itself failed");
  }
}

// --- a fault of this host, while its leader calls nothing ----------------------------------------

/// Ranks of a host detect each other's deaths and aborts in their calls. They may make no call for
/// a long time, while another host waits for their leader or for a message. So the keeper thread of
/// each rank calls this periodically. It must not wait. False ends the watch.
bool CpuEngine::pollHost() noexcept {
  Fault fault;
  for (const int peer : multiHost_.hosts.local()) {
    if (peer == config_.rank || !memory_->isDead(peer) || memory_->hasLeft(peer)) continue;
    fault.text = memory_->causeOfSilence(peer);
  }
  if (memory_->aborted()) fault = memory_->recorded();
  if (fault.text.empty()) return true;
  try {
    runOnWorker([weak = weak_from_this(), fault] {
      if (const auto self = weak.lock()) self->failIdle(fault.kind, fault.text);
    });
    return false;
  } catch (const std::exception&) {  // no thread: retry at the next poll
    return true;
  }
}

/// Fails the group. Closes the connections, so the other hosts detect that it has failed.
void CpuEngine::failIdle(ErrorKind kind, const std::string& cause) noexcept {
  abort(kind, cause);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // Else the running call, or the shutdown, closes them.
    if (closed_ || (state_.fetch_or(kRunning) & kRunning) != 0) return;
  }
  if (multiHost_.links != nullptr) multiHost_.links->close();
  release();
}

}  // namespace fastcoll
