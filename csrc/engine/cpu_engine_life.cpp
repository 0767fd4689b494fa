// The parts of CpuEngine beside its queue: how point-to-point and monitored barriers begin, and how
// a group ends, by fault or by shutdown.
#include "../base/fork.hpp"
#include "cpu_engine.hpp"

namespace fastcoll {

// --- point-to-point ----------------------------------------------------------------------------

bool CpuEngine::pointToPointShared(Milliseconds timeout) {
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
      memory_->open(config_.arenaBytes);
      auto made =
          std::make_unique<PointToPoint>(*memory_, *rendezvous_, spinMicros_, config_.ringBytes);
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

// --- end ---------------------------------------------------------------------------------------

void CpuEngine::abort(ErrorKind kind, const std::string& cause) noexcept {
  if (forkGeneration_ != forkGeneration()) return;  // a child speaks for nobody
  try {
    if (memory_ != nullptr) memory_->abort(kind, cause);
    if (rendezvous_ != nullptr) rendezvous_->cancel();
    RemoteTransport* remote = nullptr;
    PointToPoint* pointToPoint = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!interrupted_) {
        interrupted_ = true;
        faultKind_ = kind;
        fault_ = cause;
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
