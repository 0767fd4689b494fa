// The works that asynchronous calls return. A Work completes by itself. Any thread can wait for it,
// any number of times. It may outlive its group.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <mutex>
#include <vector>

#include "cpu/cpu_engine.hpp"
#include "torch/timeout_extensions.hpp"
#include "torch/torch_version.hpp"

namespace fastcoll {

class WorkFastcoll : public c10d::Work {
 public:
  WorkFastcoll(int rank, c10d::OpType type, const char* title,
               const std::optional<std::vector<at::Tensor>>& profiled,
               std::vector<at::Tensor> outputs, std::uint64_t seq, WorkTerms terms)
      : c10d::Work(rank, type, title, profiled),
        outputs_(std::move(outputs)),
        seq_(seq),
        terms_(std::move(terms)) {}

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override {}
  void abort() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  std::uint64_t getSequencenumber() const override { return seq_; }
  std::chrono::milliseconds getTimeout() const FASTCOLL_OVERRIDES_2_14 { return terms_.timeout; }
  float getDuration() const override;

  /// The work holds the engine until its end. A work that the caller keeps must not keep the
  /// group's memory and threads.
  void attach(std::shared_ptr<CpuEngine> engine) { engine_ = std::move(engine); }
  /// Ends the work: wakes its waiters, then runs its futures' callbacks, on this thread unless
  /// callsBack() was false.
  void markDone(std::exception_ptr fault) noexcept;
  void setSequence(std::uint64_t seq) { seq_ = seq; }
  /// Called once, by the thread that is about to call markDone(): whether that will run callbacks.
  /// After false it will not: a future that is made before markDone() is resolved on another
  /// thread.
  bool callsBack() {
    std::lock_guard<std::mutex> lock(futureMutex_);
    settled_ = future_ == nullptr && futureResult_ == nullptr;
    return !settled_;
  }

 protected:
  /// The engine; nullptr once the work has ended, or if it never had one.
  std::shared_ptr<CpuEngine> engine() {
    std::lock_guard<std::mutex> lock(mutex_);
    return engine_;
  }
  /// Waits for the transfer; false when `until` passed first.
  virtual bool waitForTransfer(CpuEngine& /*engine*/, std::optional<TimePoint> /*until*/) {
    return true;
  }
  /// Called when the transfer has ended, before callbacks run.
  virtual void transferEnded() noexcept {}
  virtual std::string describe() const { return c10d::opTypeToString(opType_); }

  std::vector<at::Tensor> outputs_;

 private:
  using Future = c10::intrusive_ptr<c10::ivalue::Future>;
  /// Makes a future if there is none; returns whether that came after markDone().
  bool isResolvedBefore(Future& future, const c10::TypePtr& type);
  /// Completes futures, of which each may be nullptr: with the outputs, and with a WorkResult.
  void resolve(const Future& outputs, const Future& result, const std::exception_ptr& fault) const;

  std::shared_ptr<CpuEngine> engine_;
  std::uint64_t seq_;
  WorkTerms terms_;
  const TimePoint started_ = terms_.timed ? Clock::now() : TimePoint{};  // if timed
  TimePoint ended_ = started_;
  std::mutex futureMutex_;
  bool settled_ = false;
  bool resolved_ = false;
  Future future_;
  Future futureResult_;
};

/// A collective. Its task reports its end to it.
class CollectiveWork : public WorkFastcoll, public Completion {
 public:
  using WorkFastcoll::WorkFastcoll;
  void complete(std::exception_ptr ended) noexcept override { markDone(std::move(ended)); }
  bool callsBack() override { return WorkFastcoll::callsBack(); }

 protected:
  bool waitForTransfer(CpuEngine& engine, std::optional<TimePoint> until) override;
  void transferEnded() noexcept override { done.store(true, std::memory_order_release); }
};

/// A send or receive.
class PointToPointWork : public WorkFastcoll {
 public:
  using WorkFastcoll::WorkFastcoll;
  void attach(std::shared_ptr<CpuEngine> engine, PointToPointRef op) {
    op_ = std::move(op);
    WorkFastcoll::attach(std::move(engine));
  }
  int sourceRank() const override { return op_->source; }
  bool isCompleted() override;

 protected:
  bool waitForTransfer(CpuEngine& engine, std::optional<TimePoint> until) override;

 private:
  PointToPointRef op_;
};

/// Several works as one, returned by endCoalescing.
class CombinedWork : public WorkFastcoll {
 public:
  CombinedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works,
               std::vector<at::Tensor> outputs, std::chrono::milliseconds timeout);
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  /// The duration of the work that took longest.
  float getDuration() const override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace fastcoll
