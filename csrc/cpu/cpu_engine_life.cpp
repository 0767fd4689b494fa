// The parts of CpuEngine other than its queue: how it is made, how the first collective,
// point-to-point and monitored barriers begin, and how a group is shut down.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/fork.hpp"
#include "base/interrupt.hpp"
#include "base/log.hpp"
#include "base/topology.hpp"
#include "base/worker_pool.hpp"
#include "cpu/cpu_engine.hpp"

namespace fastcoll {
namespace {
// A group of several hosts has rings inside a host that are longer by this factor. One transfer
// between hosts is a quarter of a ring. It costs Gloo the same for 0.5 and for 2 MiB.
constexpr std::size_t kMultiHostRing = 4;
// Between two looks at another thread that meets the ranks.
constexpr Milliseconds kAgreeing{2};

template <std::size_t N>
void setText(char (&field)[N], const std::string& value) {
  std::memset(field, 0, N);
  std::memcpy(field, value.data(), std::min(value.size(), N - 1));
}

}  // namespace

// --- begin and end of the object ------------------------------------------------------------

CpuEngine::CpuEngine(EngineConfig config, std::unique_ptr<KeyValueStore> store,
                     std::shared_ptr<Network> network)
    : config_(std::move(config)),
      spin_(config_.settings.spinMicros),
      digests_(config_.settings.digestsOf()),
      forkGeneration_(forkGeneration()),
      store_(std::move(store)),
      errors_(store_),
      network_(std::move(network)),
      process_(LocalProcess::get()) {
  if (config_.size == 1) {
    spin_.decide(1);
    cores_ = coresOfProcess(1 << 20);
    path_ = Path::Local;
    reason_ = "the group has one rank";
    return;
  }
  const std::uint64_t nonce = randomNonce64();
  memory_ = std::make_unique<GroupMemory>(
      process_, GroupIdentity{config_.name, config_.rank, config_.size, nonce});
  GroupRecord record{};
  record.magic = kArenaMagic;
  record.abi = kAbiVersion;
  record.bytesOfThis = sizeof record;
  record.nonce = nonce;
  record.generation = restartGeneration();
  record.process = process_->address();
  record.networkNamespace = networkNamespace();
  record.pidNamespace = pidNamespace();
  record.processStart = processStart(static_cast<int>(::getpid())).value_or(0);
  record.processBegan = processBegan();
  record.createdAt = nanosecondsSinceBoot();
  record.madeBefore = countGroup(config_.name, config_.rank);
  record.rank = static_cast<std::uint32_t>(config_.rank);
  record.size = static_cast<std::uint32_t>(config_.size);
  record.uid = ::geteuid();
  record.pid = static_cast<std::uint32_t>(::getpid());
  record.ringBytes = config_.settings.ringBytes;
  record.tuning = config_.tuning.fingerprint();
  record.sharedMemory = config_.settings.sharedMemoryChoice();
  setText(record.network, config_.settings.network);
  record.cores = allowedCores();
  record.cache = coresOfCache(record.cores);
  setText(record.bootId, bootId());
  setText(record.hostId, config_.settings.hostId);
  setText(record.host, hostName());
  setText(record.version, config_.version);
  rendezvous_ = std::make_unique<Rendezvous>(*store_, *memory_, *process_, record,
                                             config_.settings.arenaBytes);
  rendezvous_->publish();
}

CpuEngine::~CpuEngine() {
  if (forkGeneration_ != forkGeneration()) {
    // In a forked child the mutexes, threads and shared memory are the parent's: leave them alone.
    (void)pointToPoint_.release();
    (void)stream_.release();
    (void)rendezvous_.release();
    (void)memory_.release();
    (void)multiHost_.links.release();
    (void)new std::shared_ptr<KeyValueStore>(store_);
    (void)new std::shared_ptr<Network>(network_);
    return;
  }
  shutdown();
  // The rendezvous and the channels refer to the memory. The memory holds the process, as this
  // does.
  pointToPoint_.reset();
  multiHost_.links.reset();
  stream_.reset();
  rendezvous_.reset();
  memory_.reset();
  if (process_.use_count() == 1) dismissWorkers();  // the last group leaves no thread behind
}

// --- the first collective -----------------------------------------------------------------------

/// Meets all ranks, once: in the first collective, or for the first device tensors, whichever comes
/// first on this rank.
const Agreement& CpuEngine::agree(Milliseconds timeout) {
  const auto deadline = deadlineAfter(Clock::now(), timeout);
  std::unique_lock<std::mutex> lock(agreeing_, std::defer_lock);
  while (!lock.try_lock()) {  // the other thread has a deadline
    checkInterrupt();
    std::this_thread::sleep_for(kAgreeing);
  }
  if (!agreement_) agreement_ = rendezvous_->agree(deadline, timeout);
  return *agreement_;
}

void CpuEngine::decide(Milliseconds timeout) {
  const Agreement& agreement = agree(timeout);
  spin_.decide(agreement.coresEach);
  cores_ = coresOfProcess(agreement.coresEach);
  if (agreement.hosts.count() == 1) {
    makeStream(agreement, config_.settings.ringBytes);
    reason_ = agreement.reason;
    path_.store(Path::Shared, std::memory_order_release);
    log(LogLevel::Info, "group '", config_.name, "' rank ", config_.rank, "/", config_.size,
        ": transport shm, because ", agreement.reason);
    return;
  }
  span(agreement, timeout);
}

void CpuEngine::makeStream(const Agreement& agreement, std::size_t ringBytes) {
  stream_ =
      std::make_unique<SegmentStream>(*memory_, agreement.hosts.local(), agreement.sharedCache,
                                      ringBytes, spin_.micros(), config_.settings.storesChoice());
}

void CpuEngine::span(const Agreement& agreement, Milliseconds timeout) {
  multiHost_.hosts = agreement.hosts;
  multiHost_.sums = SumTree(agreement.hosts);
  multiHost_.ringBytes = kMultiHostRing * config_.settings.ringBytes;
  multiHost_.tuning = config_.tuning;
  multiHost_.memory = memory_.get();
  multiHost_.connections = &madePointToPoint();
  const Hosts& hosts = multiHost_.hosts;
  if (hosts.local().size() > 1) {
    makeStream(agreement, multiHost_.ringBytes);
    stream_->setGrace(kGrace);
    multiHost_.stream = stream_.get();
  }
  if (hosts.leads()) {
    const ErrorSite site = errorSite("init", config_, 0);
    const std::string own = memory_->memberName(config_.rank) + ": ";
    try {
      multiHost_.links = std::make_unique<Links>(network_, hosts, *memory_, agreement.id, timeout,
                                                 kGrace, multiHost_.faults);
    } catch (const CannotConnect& error) {
      throw Error(error.kind(), site, own, error.what());
    } catch (const Error& error) {
      const std::string cause = error.cause();
      const std::string line = cause.substr(0, cause.find('\n'));
      if (error.hasSite()) throw ConnectionLost(error.kind(), error.site(), line);
      throw ConnectionLost(error.kind(), site, own, line);
    }
  }
  if (hosts.local().size() > 1) process_->watch(this, [this] { return pollHost(); });
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

// --- device tensors ------------------------------------------------------------------------------

std::vector<int> CpuEngine::meet(Milliseconds timeout) {
  enter("init", 0).unlock();
  if (rendezvous_ == nullptr) return {0};
  try {
    return agree(timeout).hosts.local();
  } catch (const Error& error) {
    abort(error.kind(), error.cause());  // publishes it, because this process may end next
    throw;
  }
}

void CpuEngine::meet(int peer, Milliseconds timeout) {
  enter("init", 0).unlock();
  const auto deadline = deadlineAfter(Clock::now(), timeout);
  int polls = 0;
  for (;;) {
    const Rendezvous::Met met = rendezvous_->tryMeet(peer);
    if (met == Rendezvous::Met::Here || met == Rendezvous::Met::Elsewhere) return;
    checkInterrupt();
    enter("init", 0).unlock();
    if (Clock::now() >= deadline) {
      throw Error(ErrorKind::Timeout, errorSite("init", config_), "timed out after ",
                  timeout.count(), " ms; ", memory_->memberName(peer),
                  met == Rendezvous::Met::NotYet ? " has not created the group"
                                                 : " has not called this rank",
                  kFindDelay);
    }
    pause(polls);
  }
}

void CpuEngine::monitoredBarrier(Milliseconds timeout, bool waitAllRanks) {
  enter("monitored_barrier", 0).unlock();
  if (rendezvous_ != nullptr) rendezvous_->monitoredBarrier(timeout, waitAllRanks);
}

EngineInfo CpuEngine::info() const {
  EngineInfo info;
  switch (path_.load(std::memory_order_acquire)) {
    case Path::Undecided:
      info.transport = "undecided";
      break;
    case Path::Local:
      info.transport = "local";
      break;
    case Path::Shared:
      info.transport = "shm";
      info.stores = stream_->streamed() ? "streaming" : "plain";
      info.spinMicros = spin_.micros();
      break;
    case Path::MultiHost:
      info.transport = (multiHost_.hosts.most() > 1 ? "shm+" : "") + config_.settings.network;
      break;
  }
  info.reason = info.transport == "undecided" ? "not used yet" : reason_;
  if (process_->started()) {
    process_->retireHeld();  // memory that only ended groups held
    info.sharedBytes = process_->arena()->used();
  }
  return info;
}

// --- end ---------------------------------------------------------------------------------------

void CpuEngine::shutdown() noexcept {
  if (forkGeneration_ != forkGeneration()) return;
  process_->unwatch(this);
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
    helpers_->close();
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
