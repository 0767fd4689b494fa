// The engine of CPU tensors: one queue of collectives per group, run in order by whichever thread
// has reason to: the caller itself when the group is idle and the call synchronous, a waiter, or a
// pooled thread so that asynchronous work overlaps with computation.
//
// Only one thread runs a group's collectives at a time (`running_`). It gives that role up before
// it completes a task, so that a callback may issue collectives on the same group.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "../algorithms/algorithm.hpp"
#include "../base/settings.hpp"
#include "../group/rendezvous.hpp"
#include "../hosts/spanning.hpp"
#include "../trace/trace.hpp"
#include "first_fault.hpp"
#include "point_to_point.hpp"

namespace fastcoll {

/// How those who wait for a queued task learn of its end.
class Completion {
 public:
  virtual ~Completion() = default;
  /// Called once, without locks, when the task has been let go.
  virtual void complete(std::exception_ptr ended) noexcept { fault = std::move(ended); }
  /// complete() will run a user's code, which may wait for other collectives of the group.
  virtual bool callsBack() { return false; }
  std::exception_ptr fault;
  std::atomic<bool> done{false};
};

/// A collective on its way through the engine.
class Task {
 public:
  virtual ~Task() = default;
  Request request;
  /// Called on the running thread around the transfer: stage non-contiguous tensors in and out.
  virtual void prepare() {}
  virtual void finish() {}
  /// The transfer: one collective by default; a composite runs several, one after the other.
  using RunOne = std::function<void(Request&)>;
  virtual void transfer(const RunOne& runOne) { runOne(request); }
  /// Of a task that is queued.
  std::shared_ptr<Completion> completion;
  /// Read while the engine takes the task, which then has a record.
  const trace::Record* draft = nullptr;
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
  /// Called before a fault of the group is shown to anyone, without locks.
  std::function<void()> failing = [] {};
};

struct EngineInfo {
  std::string transport;  // "shm", "shm+gloo", "gloo", "local", "undecided"
  std::string reason;
  std::string stores;  // of shared memory: "plain" or "streaming", as the last large segment
  int spinMicros = 0;  // of waits for other ranks, before they sleep
  std::size_t sharedBytes = 0;  // reserved by the process for all its groups
};

class CpuEngine : public std::enable_shared_from_this<CpuEngine> {
 public:
  /// Makes the way to other hosts.
  using MakeNetwork = std::function<std::shared_ptr<Network>()>;

  CpuEngine(EngineConfig config, std::unique_ptr<KeyValueStore> store, MakeNetwork makeNetwork);
  ~CpuEngine();

  /// Runs the collective before it returns; throws its fault.
  void runInline(const TaskRef& task);
  /// Takes the collective and returns its number; its completion is told of its end.
  std::uint64_t submit(TaskRef task);
  /// Waits until a task is done, running the queue if nobody else does.
  void wait(const Completion& task);
  /// Waits without helping, so that it can give up: false when `until` has passed.
  bool waitUntil(const Completion& task, TimePoint until);

  /// For the call of that name and number. Throws when the group is unusable.
  PointToPoint& pointToPoint(const char* call, std::uint64_t seq);
  /// For one that has been begun.
  PointToPoint& pointToPoint() { return *pointToPoint_; }
  /// Waits for all ranks and names those that do not come; the group stays usable.
  void monitoredBarrier(Milliseconds timeout, bool waitAllRanks);

  /// Fails everything pending and later, on all ranks. From any thread; never throws.
  void abort(ErrorKind kind, const std::string& cause) noexcept;
  /// Lets pending work end for a moment, then fails it; tells the peers. Idempotent, never throws.
  void shutdown() noexcept;
  bool faulted(ErrorKind* kind = nullptr) const;
  std::uint64_t sequence() const;
  EngineInfo info() const;
  /// Whether the group is on several hosts; false as long as that is not decided.
  bool isRemote() const { return path_.load(std::memory_order_acquire) == Path::Spanning; }
  const EngineConfig& config() const { return config_; }
  const std::shared_ptr<LocalProcess>& process() const { return process_; }

 private:
  enum class Path { Undecided, Local, Shared, Spanning };

  void admit(std::unique_lock<std::mutex>& lock, Task& task);
  static void record(Task& task, bool starts = false);
  void execute(const TaskRef& task);
  void runOne(Request& request);
  void decide(Milliseconds timeout);
  void decideSpin(bool coreEach);
  std::optional<ToldFault> toldByNow(const std::string& key) const noexcept;
  ToldFault whoBroke(const std::string& text) const noexcept;
  ToldFault whyLost(int peer, const std::string& text) noexcept;
  template <typename Connect>
  void connect(Connect connect);
  std::shared_ptr<Network> network();
  void stopConnecting();
  void span(const Agreement& agreement, Milliseconds timeout);
  PointToPoint& madePointToPoint();
  struct HostWatch;
  void watchHost();
  void endHostWatch() noexcept;
  bool lookAtHost() noexcept;
  void failIdle(ErrorKind kind, const std::string& cause) noexcept;
  bool claim();
  void release(std::unique_lock<std::mutex>& lock);
  bool runHead(std::unique_lock<std::mutex>& lock, bool asWorker);
  void wakeWorker();
  void work();
  void throwIfUnusable(const char* call, std::uint64_t seq) const;
  void refuseIfUnusable(std::unique_lock<std::mutex>& lock, const char* call, std::uint64_t seq);
  std::string prefix(const char* call, std::uint64_t seq) const;
  [[noreturn]] void failHere(const Request& request, const Error& error);
  void takeConnectionsBack() noexcept;
  ToldFault tellPeers(const ToldFault& fault) noexcept;
  bool hasTold() const;
  void checkPeers(const std::string& prefix) const;

  const EngineConfig config_;
  const CoreSet cores_ = allowedCores();
  std::atomic<int> spinMicros_{0};    // while waiting for other ranks; decided with the transport
  std::atomic<int> lingerMicros_{0};  // while waiting for another thread of this process
  const std::uint64_t forkGeneration_;
  std::shared_ptr<KeyValueStore> store_;
  mutable FirstFault firstFault_;
  const MakeNetwork makeNetwork_;
  std::shared_ptr<Network> network_;
  std::mutex networkMutex_;
  std::shared_ptr<LocalProcess> process_;
  std::unique_ptr<GroupMemory> memory_;
  std::unique_ptr<Rendezvous> rendezvous_;
  std::unique_ptr<SegmentStream> stream_;
  std::unique_ptr<PointToPoint> pointToPoint_;
  std::once_flag pointToPointMade_;
  Spanning spanning_;
  std::shared_ptr<HostWatch> hostWatch_;  // of a leader
  std::atomic<Path> path_{Path::Undecided};
  std::string reason_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<TaskRef> queue_;
  bool running_ = false;
  std::uint64_t sequence_ = 0;  // of the last collective taken
  bool workerAwake_ = false;
  bool closed_ = false;
  std::atomic<bool> refused_{false};  // a call, since the group failed
  bool interrupted_ = false;          // a fault before there was shared memory to record it in
  ErrorKind faultKind_ = ErrorKind::Backend;
  std::string fault_;
  std::atomic<bool> spinDecided_{false};
  std::atomic<TimePoint> nextSpinLook_{TimePoint{}};
};

}  // namespace fastcoll
