// How a group fails, on this rank and, where memory is not shared, on the others.
#include <mutex>
#include <thread>

#include "../base/fork.hpp"
#include "../base/log.hpp"
#include "cpu_engine.hpp"
#include "worker_pool.hpp"

namespace fastcoll {
namespace {

// For the store to take a word and to give one; a store in reach does so in less than one.
constexpr Milliseconds kTelling{100};
// For the rank that noticed first to say so, and for the kernel to bury a process.
constexpr Milliseconds kWhoBroke{500};

}  // namespace

ToldFault CpuEngine::tellPeers(const ToldFault& fault) noexcept {
  if (rendezvous_ == nullptr) return fault;
  try {
    return firstFault_.tell(rendezvous_->faultKeys(), fault, kTelling);
  } catch (const std::exception&) {
    return fault;
  }
}

void CpuEngine::checkPeers(const std::string& prefix) const {
  if (const auto fault = firstFault_.heard(rendezvous_->faultKeys()[0], Milliseconds(0))) {
    throw Error(fault->kind, prefix + fault->text);
  }
}

/// What is told under the key by now. An answer that is under way may be older than this call: then
/// the second question is of now.
std::optional<ToldFault> CpuEngine::toldByNow(const std::string& key) const noexcept {
  for (int question = 0; question < 2; ++question) {
    if (auto told = firstFault_.heard(key, kTelling)) return told;
  }
  return std::nullopt;
}

/// Why a connection to another host broke: what its ranks have told, or that a process has ended.
ToldFault CpuEngine::whoBroke(const std::string& text) const noexcept {
  ToldFault fault{ErrorKind::Backend, text};
  try {
    const auto began = Clock::now(), told = began + kTelling;
    const std::string key = rendezvous_->faultKeys()[0];
    while (Clock::now() < began + kWhoBroke) {
      if (auto first = firstFault_.heard(key, Milliseconds(20))) return *first;
      // A process that has ended may have said goodbye before: its peers have time to tell.
      const std::string ended = Clock::now() < told ? "" : rendezvous_->endedProcesses();
      if (!ended.empty()) {
        if (auto first = toldByNow(key)) return *first;
        fault.text = concat(ended, ": connection closed by peer (process died); ", text);
        return fault;
      }
      std::this_thread::sleep_for(Milliseconds(5));
    }
  } catch (const std::exception&) {
  }
  return fault;
}

/// Why a connection for point-to-point broke: what the peer has told, or that it is gone.
ToldFault CpuEngine::whyLost(int peer, const std::string& text) noexcept {
  ToldFault fault{ErrorKind::Backend, brokeOff(memory_->memberName(peer), text)};
  try {
    const std::string key = rendezvous_->faultKeyOf(peer);
    for (const auto until = Clock::now() + kTelling; Clock::now() < until;) {
      if (auto told = firstFault_.heard(key, Milliseconds(20))) return *told;
      if (rendezvous_->hasEnded(peer)) {  // it may have told before
        if (auto told = toldByNow(key)) return *told;
        fault.text = concat(memory_->memberName(peer), ": connection closed by peer (process died)",
                            kReadLog);
        break;
      }
      std::this_thread::sleep_for(Milliseconds(5));
    }
  } catch (const std::exception&) {
  }
  return fault;
}

/// Fails the group with a fault of this rank, and throws: that one, or the one that came first.
void CpuEngine::failHere(const Request& request, const Error& error) {
  ToldFault fault{error.kind(), causeOf(error)};
  const std::string own = fault.text;
  if (isUnexplained(error)) fault = whoBroke(own);
  abort(fault.kind, fault.text);
  takeConnectionsBack();
  const Path path = path_.load(std::memory_order_acquire);
  if (path == Path::Undecided || path == Path::Spanning) {
    std::lock_guard<std::mutex> lock(mutex_);
    fault = {faultKind_, fault_};
  }
  // To the rank that came late the others' error says less than its own.
  const bool late = dynamic_cast<const Rendezvous::CameLate*>(&error) != nullptr;
  if (late || fault.text == own) throw error;
  throw Error(fault.kind, prefix(collectiveName(request.collective), request.seq) + fault.text);
}

/// This rank has failed already, and told the other hosts so.
bool CpuEngine::hasTold() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return interrupted_;
}

/// Of a collective that has failed, and the group with it: before its caller hears of that.
void CpuEngine::takeConnectionsBack() noexcept {
  PointToPoint* pointToPoint = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    pointToPoint = pointToPoint_.get();
  }
  if (pointToPoint != nullptr) pointToPoint->giveBack();
}

void CpuEngine::abort(ErrorKind kind, const std::string& cause) noexcept {
  if (forkGeneration_ != forkGeneration()) return;  // a child speaks for nobody
  config_.failing();
  try {
    ToldFault fault{kind, cause};
    // Memory tells only the ranks of this host.
    const Path path = path_.load(std::memory_order_acquire);
    const bool told = path == Path::Spanning ? hasTold() : path == Path::Shared || faulted();
    if (!told) fault = tellPeers(fault);
    if (memory_ != nullptr) memory_->abort(fault.kind, fault.text);
    if (rendezvous_ != nullptr) rendezvous_->cancel();
    PointToPoint* pointToPoint = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!interrupted_) {
        interrupted_ = true;
        faultKind_ = fault.kind;
        fault_ = fault.text;
      }
      changed_.notify_all();
      pointToPoint = pointToPoint_.get();
    }
    if (pointToPoint != nullptr) pointToPoint->failAll();
  } catch (...) {
    log(LogLevel::Warn, concat("group '", config_.name, "': the abort itself failed"));
  }
}

// --- a fault of this host, while its leader calls nothing ----------------------------------------

/// What the keeper thread knows of an engine; nothing when that is about to end.
struct CpuEngine::HostWatch {
  std::mutex mutex;
  CpuEngine* engine;
};

/// Ranks of a host see each other's deaths and aborts in their calls. Another host waits for this
/// one's leader, or for a message of any of its ranks, and all of them may call nothing for a long
/// time: so each looks now and then.
void CpuEngine::watchHost() {
  hostWatch_ = std::make_shared<HostWatch>();
  hostWatch_->engine = this;
  process_->watch([watch = hostWatch_] {
    const std::lock_guard<std::mutex> lock(watch->mutex);
    return watch->engine != nullptr && watch->engine->lookAtHost();
  });
}

void CpuEngine::endHostWatch() noexcept {
  if (hostWatch_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(hostWatch_->mutex);
  hostWatch_->engine = nullptr;
}

/// By the keeper thread, which must not wait: false when there is no more to look for.
bool CpuEngine::lookAtHost() noexcept {
  ErrorKind kind = ErrorKind::Backend;
  std::string cause;
  for (const int peer : spanning_.hosts.local()) {
    if (peer == config_.rank || !memory_->isDead(peer) || memory_->hasLeft(peer)) continue;
    cause = memory_->causeOfSilence(peer);
  }
  if (memory_->aborted()) memory_->recorded(kind, cause);
  if (cause.empty()) return true;
  try {
    runOnWorker([weak = weak_from_this(), kind, cause] {
      if (const auto self = weak.lock()) self->failIdle(kind, cause);
    });
  } catch (const std::exception&) {  // no thread is to be had: a call will notice
  }
  return false;
}

/// Fails the group, and shows the other hosts that it has failed.
void CpuEngine::failIdle(ErrorKind kind, const std::string& cause) noexcept {
  abort(kind, cause);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (running_ || closed_) return;  // a call that runs, or is to run, closes them
    running_ = true;
  }
  if (spanning_.links != nullptr) spanning_.links->close();
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  release(lock);
}

}  // namespace fastcoll
