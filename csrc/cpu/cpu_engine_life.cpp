// The parts of CpuEngine other than its queue: how the first collective, point-to-point and
// monitored barriers begin, and how a group is shut down.
#include "base/fork.hpp"
#include "base/log.hpp"
#include "cpu/cpu_engine.hpp"

namespace fastcoll {
namespace {
// A group of several hosts has rings inside a host that are longer by this factor. One transfer
// between hosts is a quarter of a ring. It costs Gloo the same for 0.5 and for 2 MiB.
constexpr std::size_t kMultiHostRing = 4;
}  // namespace

// --- the first collective -----------------------------------------------------------------------

void CpuEngine::decide(Milliseconds timeout) {
  const Agreement agreement = rendezvous_->agree(deadlineAfter(Clock::now(), timeout), timeout);
  spin_.decide(agreement.coreEach);
  if (agreement.hosts.count() == 1) {
    stream_ = std::make_unique<SegmentStream>(*memory_, agreement.hosts.local(),
                                              config_.settings.ringBytes, spin_.micros(),
                                              config_.settings.storesChoice());
    reason_ = agreement.reason;
    path_.store(Path::Shared, std::memory_order_release);
    log(LogLevel::Info, "group '", config_.name, "' rank ", config_.rank, "/", config_.size,
        ": transport shm, because ", agreement.reason);
    return;
  }
  span(agreement, timeout);
}

void CpuEngine::span(const Agreement& agreement, Milliseconds timeout) {
  multiHost_.hosts = agreement.hosts;
  multiHost_.sums = SumTree(agreement.hosts);
  multiHost_.ringBytes = kMultiHostRing * config_.settings.ringBytes;
  multiHost_.tuning = config_.tuning;
  multiHost_.memory = memory_.get();
  const Hosts& hosts = multiHost_.hosts;
  if (hosts.local().size() > 1) {
    stream_ = std::make_unique<SegmentStream>(*memory_, hosts.local(), multiHost_.ringBytes,
                                              spin_.micros(), config_.settings.storesChoice());
    stream_->setGrace(kGrace);
    multiHost_.stream = stream_.get();
  }
  if (hosts.leads()) {
    const ErrorSite site = errorSite("init", config_, 0);
    const std::string own = memory_->memberName(config_.rank) + ": ";
    try {
      multiHost_.links = std::make_unique<Links>(network_->get(), hosts, *memory_, agreement.id,
                                                 timeout, kGrace, multiHost_.faults);
    } catch (const CannotConnect& error) {
      throw Error(error.kind(), site, own, error.what());
    } catch (const Error& error) {
      const std::string cause = error.cause();
      const std::string line = cause.substr(0, cause.find('\n'));
      if (error.hasSite()) throw ConnectionLost(error.kind(), error.site(), line);
      throw ConnectionLost(error.kind(), site, own, line);
    }
  }
  if (hosts.local().size() > 1) watchHost();
  reason_ = agreement.reason;
  path_.store(Path::MultiHost, std::memory_order_release);
  const bool asked = config_.settings.sharedMemoryChoice() == SharedMemoryChoice::Off;
  log(config_.rank == 0 && !asked ? LogLevel::Warn : LogLevel::Info,
      concat("group '", config_.name, "': the ranks are on ", hosts.count(), " hosts, with ",
             config_.settings.network, " between them, because ", agreement.reason));
}

// --- point-to-point ----------------------------------------------------------------------------

PointToPoint& CpuEngine::pointToPoint(const char* call, std::uint64_t seq) {
  if (!mayEnter()) enter(call, seq).unlock();
  return madePointToPoint();
}

PointToPoint& CpuEngine::madePointToPoint() {
  std::call_once(pointToPointMade_, [this] {
    PointToPoint::Setup setup{*this, *network_, spin_, weak_from_this()};
    setup.ringBytes = config_.settings.ringBytes;
    setup.stores = config_.settings.storesChoice();
    setup.streamingBytes = config_.tuning.streamingBytes;
    auto made = std::make_unique<PointToPoint>(*memory_, *rendezvous_, setup);
    const std::lock_guard<std::mutex> lock(mutex_);
    pointToPoint_ = std::move(made);
  });
  return *pointToPoint_;
}

void CpuEngine::monitoredBarrier(Milliseconds timeout, bool waitAllRanks) {
  enter("monitored_barrier", 0).unlock();
  if (rendezvous_ != nullptr) rendezvous_->monitoredBarrier(timeout, waitAllRanks);
}

// --- end ---------------------------------------------------------------------------------------

void CpuEngine::shutdown() noexcept {
  if (forkGeneration_ != forkGeneration()) return;
  endHostWatch();
  const auto failPending = [this] {
    abort(ErrorKind::Backend,
          concat("the group was destroyed on rank ", config_.rank,
                 " with work pending. Wait for all work before you destroy a group."));
  };
  try {
    std::unique_lock<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
    state_ |= kCheck;
    toWorker_.notify_one();
    const auto idle = [this] { return (state_ & kRunning) == 0 && queue_.empty(); };
    // Wait briefly for work that is about to end. Fail the rest without a longer wait.
    bool ended = changed_.wait_for(lock, Milliseconds(300), idle);
    if (!ended) {
      lock.unlock();
      failPending();
      lock.lock();
      ended = changed_.wait_for(lock, Milliseconds(500), idle);
    }
    PointToPoint* const pointToPoint = pointToPoint_.get();
    lock.unlock();
    const bool keep =
        pointToPoint != nullptr && !pointToPoint->flush(Clock::now() + Milliseconds(500));
    network_->stopConnecting();
    if (pointToPoint != nullptr) {
      pointToPoint->stop();
      if (pointToPoint->hasPending()) failPending();
    }
    if (memory_ == nullptr) return;
    if (ended) multiHost_.links.reset();
    memory_->close(keep);
    // A thread that still runs a collective may write to peers' memory, so leave only without one.
    if (ended) memory_->leave();
  } catch (...) {
    log(LogLevel::Warn, "group '", config_.name, "': the shutdown failed");
  }
}

}  // namespace fastcoll
