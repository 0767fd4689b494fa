#include "cpu/cpu_engine.hpp"

#include <algorithm>
#include <utility>

#include "base/entry_lock.hpp"
#include "base/fork.hpp"
#include "base/interrupt.hpp"
#include "base/worker_pool.hpp"

namespace fastcoll {
namespace {

// A worker without a task stays awake for kStay and checks the queue every kLook. Meanwhile a task
// of at most kSmallTask bytes does not wake it. The caller usually waits soon and runs the task
// itself, and a woken thread would take a core from this or another rank. If the last caller did
// not wait within kLook, the next task wakes the worker.
constexpr std::chrono::microseconds kLook{400};
constexpr std::chrono::milliseconds kStay{4};
constexpr std::size_t kSmallTask = 65536;

// Bytes of a collective for each thread that it runs on. A shorter one is as fast on one thread.
constexpr std::size_t kBytesOfThread = std::size_t{256} << 10;

std::size_t bytesOf(const Request& request) {
  return request.count * elementSize(request.dtype);
}

std::atomic<int (*)()> computeThreads{nullptr};

}  // namespace

void setComputeThreads(int (*count)()) {
  computeThreads = count;
}

/// Whether a call may begin without the mutex. If not, enter() may still find that it can.
bool CpuEngine::mayEnter() const {
  return (state_.load(std::memory_order_acquire) & kCheck) == 0 &&
         forkGeneration_ == forkGeneration() && (memory_ == nullptr || !memory_->aborted());
}

/// Locks the engine at the start of a call. Throws if the group is unusable, without the lock. In a
/// forked child it does not lock: a thread of the parent may have held the mutex at the fork.
std::unique_lock<std::mutex> CpuEngine::enter(const char* call, std::uint64_t seq) {
  const bool forked = forkGeneration_ != forkGeneration();
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  if (!forked) lock.lock();
  const bool destroyed = closed_, aborted = !forked && memory_ != nullptr && memory_->aborted();
  if (!forked && !destroyed && !aborted && !fault_) return lock;
  const Fault fault = fault_.value_or(Fault{});
  if (seq == kNext) seq = sequence() + 1;
  if (!forked) lock.unlock();
  beforeWait();
  if (!destroyed) failing();  // another rank's fault may be seen here first
  const ErrorSite site = errorSite(call, config_, seq);
  if (forked) throw Error(ErrorKind::Backend, site, kForked);
  if (destroyed) {
    throw Error(ErrorKind::Backend, site, "the group was destroyed", kInitAgain);
  }
  if (aborted) memory_->throwAborted(site);
  throw Error(fault.kind, site, "the group failed before: ", fault.text);
}

// --- running collectives -----------------------------------------------------------------------

void Task::run(CpuEngine& engine) {
  engine.run(request);
}

void CpuEngine::run(Request& request) {
  if (bytesOf(request) > kBriefBytes) beforeWait();
  if (!digests_.areOn()) return transfer(request);
  digests_.before(request, path_.load() == Path::Shared ? stream_.get() : nullptr);
  transfer(request);
  digests_.after(request);
}

/// The threads of this rank that run a collective. One that runs beside the program leaves it the
/// cores that torch computes with.
int CpuEngine::threadsFor(const Request& request) const {
  const std::size_t most = bytesOf(request) / kBytesOfThread;
  if (most < 2) return 1;
  int threads = static_cast<int>(config_.settings.threads);
  if (threads == 0) {
    const auto count = besideProgram_ ? computeThreads.load() : nullptr;
    threads = count == nullptr ? cores_ : cores_ - count();
  }
  return static_cast<int>(std::min(most, static_cast<std::size_t>(std::max(threads, 1))));
}

void CpuEngine::transfer(Request& request) {
  const int threads = threadsFor(request);
  std::optional<Helpers::Lent> helpers;
  if (threads > 1) helpers.emplace(*helpers_, threads, config_.settings.threads > 0);
  switch (path_.load(std::memory_order_acquire)) {
    case Path::Local:
      return runSingleRank(request);
    case Path::Shared:
      runCollective(*stream_, request, config_.tuning);
      break;
    default:
      beforeWait();
      request.deadline = deadlineAfter(Clock::now(), request.timeout);
      runMultiHost(multiHost_, request,
                   errorSite(collectiveName(request.collective), config_, request.seq));
  }
  if (stream_ != nullptr) stream_->completed(request);
}

void CpuEngine::execute(Task& task) {
  Request& request = task.request;
  const auto fail = [&](const char* what, const std::string& end) {
    beforeWait();
    abort(ErrorKind::Backend,
          concat("rank ", config_.rank, what, describe(request.signature()), end));
    takeConnectionsBack();
    trace::fail(task.trace, std::current_exception());
  };
  try {
    if (path_.load(std::memory_order_acquire) == Path::Undecided) {
      beforeWait();
      decide(request.timeout);
    }
    digests_.begin();
    multiHost_.call = task.trace;
    task.run(*this);
    trace::complete(task.trace, digests_.ofCall());
  } catch (const Error& error) {
    beforeWait();
    const Error first = failHere(request, error);
    trace::fail(task.trace, first.what());
    throw first;
  } catch (const std::exception& error) {
    fail(" failed in ", concat(": ", error.what()));
    throw;
  } catch (...) {
    fail(" was interrupted in ", std::string(kReadLog));
    throw;
  }
}

/// Gives back the right to run. A thread that queues a task or closes the group sets kCheck in the
/// same word, under the mutex. So this thread sees kCheck and notifies, or the other thread sees
/// that no thread runs. A wait for a task needs no flag, because the task is queued, or runHead()
/// runs it.
void CpuEngine::release() {
  if ((state_.fetch_and(~kRunning, std::memory_order_acq_rel) & kCheck) == 0) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
  if (!queue_.empty()) tryToWakeWorker();
}

/// Clears kCheck under the mutex, if nothing needs it any more.
void CpuEngine::uncheck() {
  if (queue_.empty() && !closed_ && !fault_) state_.fetch_and(~kCheck);
}

/// Admits a call that its own thread runs at once. False: admit() must look.
bool CpuEngine::admitHere(Task& task) {
  std::uint64_t state = state_.load(std::memory_order_relaxed);
  if ((state & kRunning) != 0 || !mayEnter()) return false;
  state &= ~kCheck;  // if it is set now, the exchange fails
  if (!state_.compare_exchange_strong(state, (state | kRunning) + kOne,
                                      std::memory_order_acquire)) {
    return false;
  }
  task.request.seq = state / kOne + 1;
  task.trace = trace::record(task.draft, task.request.seq, true);
  return true;
}

/// Gives a call its sequence number and records it in the trace, or refuses it. Returns the lock.
/// `here`: the caller wants to run it on its own thread; on return, whether it must run it now. The
/// trace also records the first call that is refused after a fault. That record distinguishes a
/// late rank from one that did not arrive.
std::unique_lock<std::mutex> CpuEngine::admit(Task& task, bool& here) {
  std::unique_lock<std::mutex> lock;
  try {
    lock = enter(collectiveName(task.request.collective), kNext);
  } catch (const Error& error) {
    if (!refused_.exchange(true)) {
      trace::fail(trace::record(task.draft, sequence() + 1), error.what());
    }
    throw;
  }
  std::uint64_t state = state_.load();
  bool runs = false;
  do {
    runs = here && (state & kRunning) == 0 && queue_.empty();
  } while (!state_.compare_exchange_weak(state, (state + kOne) | (runs ? kRunning : kCheck)));
  here = runs;
  task.request.seq = state / kOne + 1;
  task.trace = trace::record(task.draft, task.request.seq, here);
  return lock;
}

void CpuEngine::runInline(const TaskRef& task) {
  bool here = admitHere(*task);
  std::unique_lock<std::mutex> lock;
  if (!here) {
    here = true;
    lock = admit(*task, here);
    if (here) lock.unlock();
  }
  if (here) {
    besideProgram_ = false;
    try {
      execute(*task);
    } catch (...) {
      release();
      throw;
    }
    return release();
  }
  // Another collective runs or is queued: queue behind it and help.
  beforeWait();
  const auto ended = std::make_shared<Completion>();
  task->completion = ended;
  queue_.push_back(task);
  tryToWakeWorker();
  lock.unlock();
  wait(*ended);
  if (ended->fault) std::rethrow_exception(ended->fault);
}

std::uint64_t CpuEngine::submit(TaskRef task) {
  bool here = false;
  std::unique_lock<std::mutex> lock = admit(*task, here);
  const std::uint64_t seq = task->request.seq;
  const bool small = bytesOf(task->request) <= kSmallTask;
  queue_.push_back(std::move(task));
  submitted_ = Clock::now();
  try {
    if (!small || waitedLate_ || !workerAwake_) wakeWorker();
  } catch (const std::exception& error) {
    const TaskRef refused = std::move(queue_.back());
    queue_.pop_back();  // a call that throws must not run later
    uncheck();
    lock.unlock();
    trace::fail(refused->trace, error.what());
    throw;
  }
  return seq;
}

void CpuEngine::wakeWorker() {
  if (workerAwake_) return toWorker_.notify_one();
  runOnWorker([self = shared_from_this()] { self->work(); });
  workerAwake_ = true;  // under the lock that work() takes first
}

/// For a queue of which each task has a waiter, or gets one: waiters run it too.
void CpuEngine::tryToWakeWorker() noexcept {
  try {
    wakeWorker();
  } catch (const std::exception&) {  // out of threads
  }
}

/// Runs the queue's first task, unless another thread runs one. `interrupt`: what interrupted it on
/// the thread of a waiter; nullptr on a worker.
CpuEngine::Head CpuEngine::runHead(std::unique_lock<std::mutex>& lock,
                                   std::exception_ptr* interrupt) {
  if (queue_.empty() || (state_.fetch_or(kRunning) & kRunning) != 0) return Head::None;
  TaskRef task = std::move(queue_.front());
  queue_.pop_front();
  uncheck();
  lock.unlock();
  trace::start(task->trace);
  std::exception_ptr fault;
  (void)wasInterrupted();
  besideProgram_ = interrupt == nullptr;
  try {
    execute(*task);
  } catch (...) {
    fault = std::current_exception();
    if (interrupt != nullptr && wasInterrupted()) *interrupt = fault;
  }
  auto completion = task->completion;
  task.reset();  // releases the tensors before any waiter is notified
  lock.lock();
  state_.fetch_and(~kRunning);
  // A callback may block until another collective of this group is done. Another thread must be
  // there to run that one.
  const bool stepsAside = interrupt == nullptr && completion->callsBack();
  if (stepsAside) {
    workerAwake_ = false;
    if (!queue_.empty()) tryToWakeWorker();
  }
  changed_.notify_all();
  lock.unlock();
  completion->complete(std::move(fault));
  completion->done.store(true, std::memory_order_release);
  completion.reset();  // it may hold the last reference to tensors, so without the lock
  lock.lock();
  changed_.notify_all();
  if (!stepsAside) return Head::Ran;
  return std::exchange(workerAwake_, true) ? Head::TakenOver : Head::Ran;
}

void CpuEngine::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    const Head head = runHead(lock, nullptr);
    if (head == Head::Ran) continue;
    if (head == Head::TakenOver) return;
    if (!queue_.empty()) {
      changed_.wait_for(lock, kWaitSlice);  // another thread runs the queue
      continue;
    }
    if (closed_ || Clock::now() - submitted_ >= kStay) break;
    toWorker_.wait_for(lock, kLook);
    waitedLate_ = waitedLate_ || !queue_.empty();
  }
  workerAwake_ = false;
}

void CpuEngine::wait(const Completion& task) {
  std::unique_lock<std::mutex> lock(mutex_);
  waitedLate_ = Clock::now() - submitted_ > kLook;
  while (!task.done.load(std::memory_order_acquire)) {
    std::exception_ptr interrupt;
    if (runHead(lock, &interrupt) != Head::None) {
      // The signal is for this thread, even if it ran the task of another call.
      if (interrupt != nullptr) std::rethrow_exception(interrupt);
      continue;
    }
    lock.unlock();
    checkInterrupt();
    lock.lock();
    if (task.done.load(std::memory_order_acquire) ||
        ((state_ & kRunning) == 0 && !queue_.empty())) {
      continue;
    }
    changed_.wait_for(lock, kWaitSlice);
  }
}

bool CpuEngine::waitUntil(const Completion& task, TimePoint until) {
  std::unique_lock<std::mutex> lock(mutex_);
  toWorker_.notify_one();
  while (!task.done.load(std::memory_order_acquire)) {
    const auto now = Clock::now();
    if (now >= until) return false;
    changed_.wait_for(lock, std::min<Clock::duration>(kWaitSlice, until - now));
    lock.unlock();
    checkInterrupt();
    lock.lock();
  }
  return true;
}

bool CpuEngine::faulted(ErrorKind* kind) const {
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  if (forkGeneration_ == forkGeneration()) lock.lock();  // see enter()
  if (kind != nullptr) *kind = fault_.value_or(Fault{}).kind;
  return fault_ || (memory_ != nullptr && memory_->aborted());
}

}  // namespace fastcoll
