// The engine of CPU tensors: one queue of collectives per group, run in order. If the group is
// idle, the caller of a synchronous collective runs it. Otherwise a waiter or a pooled thread runs
// the queue. The pooled thread lets asynchronous work overlap with computation.
//
// One thread at a time runs a group's collectives. It gives the right to run back before it
// completes a task, so a callback may issue collectives on the same group. A caller that runs its
// own collective takes and gives back that right by one atomic word each, without the mutex, as
// long as nothing is queued.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/settings.hpp"
#include "cpu/abort_hooks.hpp"
#include "cpu/algorithms/algorithm.hpp"
#include "cpu/digests.hpp"
#include "cpu/hosts/multi_host.hpp"
#include "cpu/point_to_point/point_to_point.hpp"
#include "cpu/spin_time.hpp"
#include "group/group_faults.hpp"
#include "group/rendezvous.hpp"
#include "network/connection.hpp"
#include "trace/trace.hpp"

namespace fastcoll {

class CpuEngine;

/// Reports the end of a queued task to its waiters.
class Completion {
 public:
  virtual ~Completion() = default;
  /// Called once, without locks, after the engine has released the task.
  virtual void complete(std::exception_ptr ended) noexcept { fault = std::move(ended); }
  /// Whether complete() runs user code, which may wait for other collectives of the group.
  virtual bool callsBack() { return false; }
  std::exception_ptr fault;
  std::atomic<bool> done{false};
};

/// A collective in the engine.
class Task {
 public:
  virtual ~Task() = default;
  Request request;
  /// Runs its collectives, one by default, on the engine's running thread.
  virtual void run(CpuEngine& engine);
  /// Set for a task that is queued.
  std::shared_ptr<Completion> completion;
  /// What the trace records of it; nothing if its group is 0.
  trace::Record draft;
  trace::RecordId trace = 0;
};
using TaskRef = std::shared_ptr<Task>;

struct EngineConfig {
  std::string name;
  int rank = 0;
  int size = 1;
  Settings settings;
  TuningTable tuning;
  std::string version;
  std::shared_ptr<AbortHooks> abortHooks;  // if there are any
};

/// Sets how many cores the program computes with while a collective runs beside it.
void setComputeThreads(int (*count)());

struct EngineInfo {
  std::string transport;  // "shm", "gloo" (the network), "shm+gloo", "local", "undecided"
  std::string reason;
  std::string stores;  // to shared memory: "plain" or "streaming", as for the last large segment
  int spinMicros = 0;  // how long a wait for other ranks spins before it sleeps
  std::size_t sharedBytes = 0;  // reserved by the process for all its groups
};

class CpuEngine final : public std::enable_shared_from_this<CpuEngine>, private GroupFaults {
 public:
  CpuEngine(EngineConfig config, std::unique_ptr<KeyValueStore> store,
            std::shared_ptr<Network> network);
  ~CpuEngine();

  /// For a running task: runs a collective.
  void run(Request& request);
  /// Returns when the collective has run; throws its fault.
  void runInline(const TaskRef& task);
  /// Queues the collective and returns its number. Its completion is called at its end.
  std::uint64_t submit(TaskRef task);
  /// Waits until a task is done. Runs the queue if no other thread does.
  void wait(const Completion& task);
  /// Waits without running the queue, so it can end on time: false when `until` has passed.
  bool waitUntil(const Completion& task, TimePoint until);

  /// For the call of that name and number. Throws if the group is unusable.
  PointToPoint& pointToPoint(const char* call, std::uint64_t seq);
  /// For an operation that has begun.
  PointToPoint& pointToPoint() { return *pointToPoint_; }
  /// For device tensors, which move without this engine: meets all ranks, who all call it, and
  /// returns the ranks of this host. Any number of times; from any thread.
  std::vector<int> meet(Milliseconds timeout);
  /// Meets one other rank, which calls it too.
  void meet(int peer, Milliseconds timeout);
  /// nullptr: the group has one rank. A peer that this rank has met is bound in it, if it is on
  /// this host.
  GroupMemory* memory() const { return memory_.get(); }
  /// Waits for all ranks; its error names the missing ranks. The group stays usable.
  void monitoredBarrier(Milliseconds timeout, bool waitAllRanks);

  /// Fails all pending and later work, on all ranks. From any thread; never throws.
  void abort(ErrorKind kind, const std::string& cause) noexcept;
  /// Waits briefly for pending work, then fails it and notifies the peers. Idempotent, never
  /// throws.
  void shutdown() noexcept;
  bool faulted(ErrorKind* kind = nullptr) const;
  std::uint64_t sequence() const { return state_.load(std::memory_order_relaxed) / kOne; }
  EngineInfo info() const;
  /// Whether the group is on several hosts; false while that is undecided.
  bool isRemote() const { return path_.load(std::memory_order_acquire) == Path::MultiHost; }
  const EngineConfig& config() const { return config_; }
  const std::shared_ptr<LocalProcess>& process() const { return process_; }

 private:
  enum class Path { Undecided, Local, Shared, MultiHost };

  static constexpr std::uint64_t kNext = ~std::uint64_t{0};  // the number after the last one

  // The word `state_`: two flags, and the number of the last admitted collective.
  static constexpr std::uint64_t kRunning = 1;  // a thread runs the group's collectives
  /// Look under the mutex: tasks are queued, or the group was closed or has failed.
  static constexpr std::uint64_t kCheck = 2;
  static constexpr std::uint64_t kOne = 4;  // of the number

  bool mayEnter() const;
  std::unique_lock<std::mutex> enter(const char* call, std::uint64_t seq);
  bool admitHere(Task& task);
  std::unique_lock<std::mutex> admit(Task& task, bool& here);
  void uncheck();
  void execute(Task& task);
  void transfer(Request& request);
  int threadsFor(const Request& request) const;
  const Agreement& agree(Milliseconds timeout);
  void decide(Milliseconds timeout);
  void span(const Agreement& agreement, Milliseconds timeout);
  void makeStream(const Agreement& agreement, std::size_t ringBytes);
  PointToPoint& madePointToPoint();
  PointToPoint* pointToPointSoFar();
  bool pollHost() noexcept;
  void failIdle(ErrorKind kind, const std::string& cause) noexcept;
  void release();
  /// What became of the queue's first task: there was none to run, this thread has run it, or that
  /// and another worker has taken over meanwhile.
  enum class Head { None, Ran, TakenOver };
  Head runHead(std::unique_lock<std::mutex>& lock, std::exception_ptr* interrupt);
  void wakeWorker();
  void tryToWakeWorker() noexcept;
  void work();
  Error failHere(const Request& request, const Error& error);
  void takeConnectionsBack() noexcept;
  void failing() noexcept override;
  Fault publish(const Fault& fault) noexcept override;
  void throwIfPublished(const ErrorSite& site) override;
  Fault explain(int peer, const std::string& text) noexcept override;

  const EngineConfig config_;
  SpinTime spin_;  // decided with the transport
  GroupDigests digests_;
  const std::shared_ptr<Helpers> helpers_ = std::make_shared<Helpers>();
  int cores_ = 1;               // this rank's, once the transport is decided
  bool besideProgram_ = false;  // the running thread is not one that the program waits with
  const std::uint64_t forkGeneration_;
  std::shared_ptr<KeyValueStore> store_;
  ErrorChannel errors_;
  const std::shared_ptr<Network> network_;  // to other hosts
  std::shared_ptr<LocalProcess> process_;
  std::unique_ptr<GroupMemory> memory_;
  std::unique_ptr<Rendezvous> rendezvous_;
  std::mutex agreeing_;
  std::optional<Agreement> agreement_;
  std::unique_ptr<SegmentStream> stream_;
  std::unique_ptr<PointToPoint> pointToPoint_;
  std::once_flag pointToPointMade_;
  MultiHost multiHost_{*this};
  std::atomic<Path> path_{Path::Undecided};
  std::string reason_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;   // a task has ended
  std::condition_variable toWorker_;  // wakes the worker for a queued task
  std::deque<TaskRef> queue_;
  std::atomic<std::uint64_t> state_{0};
  TimePoint submitted_;      // when the last task was queued
  bool waitedLate_ = false;  // the last caller did not wait soon
  bool workerAwake_ = false;
  bool closed_ = false;
  std::atomic<bool> refused_{false};  // a call was refused because the group has failed
  std::optional<Fault> fault_;        // for which this rank has aborted the group
};

}  // namespace fastcoll
