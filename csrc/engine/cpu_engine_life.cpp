// The parts of CpuEngine beside its queue: how point-to-point and monitored barriers begin, and how
// a group ends, by fault or by shutdown.
#include <thread>

#include "../base/fork.hpp"
#include "cpu_engine.hpp"

namespace fastcoll {

// --- point-to-point ----------------------------------------------------------------------------

bool CpuEngine::pointToPointShared(Milliseconds timeout, const char* call, std::uint64_t seq) {
  std::lock_guard<std::mutex> lock(pairMutex_);
  {
    std::lock_guard<std::mutex> state(mutex_);
    throwIfUnusable(Request{});
  }
  if (pairState_ == 0) {
    const Path path = path_.load(std::memory_order_acquire);
    bool shared = path == Path::Shared;
    if (path == Path::Undecided) {
      std::string why;
      shared = rendezvous_->sameHost(deadlineAfter(Clock::now(), timeout), timeout, why);
    }
    if (shared) {
      try {
        memory_->open(config_.arenaBytes);
      } catch (const Error& error) {
        // The peer may be waiting already, and the ranks that use Gloo do so all together.
        const std::string cause =
            concat(memory_->memberName(config_.rank),
                   " has no shared memory for point-to-point: ", error.what());
        abort(error.kind(), cause);
        throw Error(error.kind(), prefix(call, seq) + cause);
      }
      auto made = std::make_unique<PointToPoint>(*memory_, *rendezvous_, spinMicros_,
                                                 config_.ringBytes, [this] {
                                                   ToldFault fault;
                                                   memory_->recorded(fault.kind, fault.text);
                                                   tellPeers(fault);
                                                 });
      std::lock_guard<std::mutex> state(mutex_);
      pointToPoint_ = std::move(made);
    }
    pairState_ = shared ? 1 : 2;
  }
  return pairState_ == 1;
}

PointToPoint& CpuEngine::pointToPoint() {
  return *pointToPoint_;
}

RemoteTransport& CpuEngine::remote(Milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (running_) changed_.wait_for(lock, kWaitSlice);
  throwIfUnusable(Request{});
  running_ = true;
  lock.unlock();
  try {
    if (path_.load(std::memory_order_acquire) == Path::Undecided) decide(timeout);
  } catch (...) {
    release(lock);
    throw;
  }
  release(lock);
  if (remote_ == nullptr) {
    throw Error(ErrorKind::Backend, prefix("init", 0) + "the ranks share memory, not Gloo");
  }
  return *remote_;
}

void CpuEngine::monitoredBarrier(Milliseconds timeout, bool waitAllRanks) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    throwIfUnusable(Request{});
  }
  if (rendezvous_ != nullptr) rendezvous_->monitoredBarrier(timeout, waitAllRanks);
}

// --- faults where memory is not shared, or not yet ---------------------------------------------

namespace {

// For the store to take a word and to give one; a store in reach does so in less than one.
constexpr Milliseconds kTelling{100};
// For the rank that noticed first to say so, and for the kernel to bury a process.
constexpr Milliseconds kWhoBroke{500};

/// An error's text without the call and rank at its head, which are not those of other ranks.
std::string causeIn(const std::string& text) {
  const auto end = text.find("]: ");
  return text.rfind("fastcoll.", 0) == 0 && end != std::string::npos ? text.substr(end + 3) : text;
}

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

ToldFault CpuEngine::whoBroke(const std::string& text) const noexcept {
  ToldFault fault{ErrorKind::Backend, text};
  try {
    const auto until = Clock::now() + kWhoBroke;
    const std::string key = rendezvous_->faultKeys()[0];
    while (Clock::now() < until) {
      if (auto first = firstFault_.heard(key, Milliseconds(20))) return *first;
      const std::string ended = rendezvous_->endedProcesses();
      if (!ended.empty()) {
        fault.text = ended + ": connection closed by peer (process died); " + text;
        return fault;
      }
      std::this_thread::sleep_for(Milliseconds(5));
    }
  } catch (const std::exception&) {
  }
  return fault;
}

/// Fails the group with a fault of this rank, and throws: that one, or the one that came first.
void CpuEngine::failHere(const Request& request, const Error& error, bool connectionLost) {
  ToldFault fault{error.kind(), causeIn(error.what())};
  const std::string own = fault.text;
  if (connectionLost) fault = whoBroke(own);
  abort(fault.kind, fault.text);
  const Path path = path_.load(std::memory_order_acquire);
  if (path == Path::Undecided || path == Path::Remote) {
    std::lock_guard<std::mutex> lock(mutex_);
    fault = {faultKind_, fault_};
  }
  if (fault.text == own) throw error;
  throw Error(fault.kind, prefix(collectiveName(request.collective), request.seq) + fault.text);
}

// --- end ---------------------------------------------------------------------------------------

void CpuEngine::abort(ErrorKind kind, const std::string& cause) noexcept {
  if (forkGeneration_ != forkGeneration()) return;  // a child speaks for nobody
  try {
    ToldFault fault{kind, cause};
    const bool shared = path_.load(std::memory_order_acquire) == Path::Shared;
    if (!shared && !faulted()) fault = tellPeers(fault);
    if (memory_ != nullptr) memory_->abort(fault.kind, fault.text);
    if (rendezvous_ != nullptr) rendezvous_->cancel();
    RemoteTransport* remote = nullptr;
    PointToPoint* pointToPoint = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!interrupted_) {
        interrupted_ = true;
        faultKind_ = fault.kind;
        fault_ = fault.text;
      }
      changed_.notify_all();
      remote = remote_.get();
      pointToPoint = pointToPoint_.get();
    }
    if (remote != nullptr) remote->abort();
    if (pointToPoint != nullptr) pointToPoint->failAll();
  } catch (...) {
    log(LogLevel::Warn, concat("group '", config_.name, "': the abort itself failed"));
  }
}

void CpuEngine::shutdown() noexcept {
  if (forkGeneration_ != forkGeneration()) return;
  try {
    std::unique_lock<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
    const auto idle = [this] { return !running_ && queue_.empty(); };
    // Work that is about to end may end; work that is not is failed rather than waited for.
    if (!changed_.wait_for(lock, Milliseconds(300), idle)) {
      lock.unlock();
      abort(ErrorKind::Backend,
            concat("the group was destroyed on rank ", config_.rank, " with work pending"));
      lock.lock();
      changed_.wait_for(lock, Milliseconds(500), idle);
    }
    PointToPoint* const pointToPoint = pointToPoint_.get();
    lock.unlock();
    bool keep = false;
    if (pointToPoint != nullptr) {
      keep = !pointToPoint->flush(Clock::now() + Milliseconds(500));
      pointToPoint->stop();
      if (pointToPoint->hasPending()) {
        abort(ErrorKind::Backend,
              concat("the group was destroyed on rank ", config_.rank, " with work pending"));
      }
    }
    if (memory_ != nullptr) memory_->close(keep);
  } catch (...) {
    log(LogLevel::Warn, concat("group '", config_.name, "': the shutdown failed"));
  }
}

}  // namespace fastcoll
