// The c10d::Backend of fastcoll. It validates each call, turns its tensors into a request, and
// gives it to the engine of their device.
//
// process_group.cpp         life, options, groups, abort
// process_group_device.cpp  launching on a device with streams
// calls/                    the calls, their launch on the CPU, and their records in the trace
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/log.hpp"
#include "base/weak_registry.hpp"
#include "calls/message_numbers.hpp"
#include "calls/reduction.hpp"
#include "cpu/abort_hooks.hpp"
#include "cpu/cpu_engine.hpp"
#include "torch/device_engine.hpp"
#include "torch/error.hpp"
#include "torch/options.hpp"
#include "torch/tensors.hpp"
#include "torch/timeout_extensions.hpp"
#include "torch/work.hpp"

namespace fastcoll {

using Tensors = std::vector<at::Tensor>;
using WorkRef = c10::intrusive_ptr<c10d::Work>;

class TensorMessage;

class ProcessGroupFastcoll : public c10d::Backend {
 public:
  using Options = fastcoll::Options;

  ProcessGroupFastcoll(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                       c10::intrusive_ptr<Options> options);
  ~ProcessGroupFastcoll() override;
  /// Called when only weak references to the group are left: in communicators, and in the group
  /// that it was split from.
  void release_resources() override;

  // --- life and groups (process_group.cpp)
  const std::string& name() const { return name_; }
  const std::string getBackendName() const override { return "fastcoll"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return options_->clone();
  }
  c10::intrusive_ptr<Options> options() const { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    if (const auto engine = device()) engine->setTimeout(timeout);
  }
  void addEphemeralTimeout(const std::chrono::milliseconds& extension) FASTCOLL_OVERRIDES_2_14 {
    extensions_.add(extension);
  }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override;
  void eagerConnectSingleDevice(at::Device device) override;
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  std::uint64_t splitCount() const { return splits_; }
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                          const int& rank, const int& size) override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return engine_->sequence(); }
  c10d::ErrorType getError() override;
  void enableCollectivesTiming() override { timed_ = true; }
  void registerAbortHook(std::int64_t id, AbortHooks::Hook hook) FASTCOLL_OVERRIDES_2_14 {
    abortHooks_->add(id, std::move(hook));
  }
  void unregisterAbortHook(std::int64_t id) FASTCOLL_OVERRIDES_2_14 { abortHooks_->remove(id); }
  void abort() override;
  void shutdown() override;
  /// Whether DDP may allocate its buckets by allocateTensor(); true if peers can read them.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  /// As allocateTensor, but throws if shared memory is lacking, instead of using other memory.
  at::Tensor allocateShared(long size, at::TensorOptions options);
  /// Whether all of the tensor's memory is shared, so peers read it in place.
  bool isShared(const at::Tensor& tensor) const;
  EngineInfo info() const { return engine_->info(); }
  /// The engines of this process's live groups. shutdownAll() ends all groups, at exit.
  static std::vector<std::shared_ptr<CpuEngine>> live();
  static void shutdownAll();

  // --- collectives (calls/)
  WorkRef broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkRef allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  /// As allreduce of one CPU tensor, but into another tensor, which does not overlap it.
  WorkRef allreduceInto(const at::Tensor& output, const at::Tensor& input,
                        const c10d::AllreduceOptions& opts);
  WorkRef allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkRef allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  /// As allreduce_coalesced; the tensors may have several dtypes.
  WorkRef allreduceList(const Tensors& tensors, const c10d::AllreduceOptions& opts,
                        std::shared_ptr<const AllReduceOptions> onDevice = nullptr);
  /// As allreduce of all tensors, which have one dtype and are on the CPU. Those that travel in
  /// another dtype are summed in float32 and rounded once more. The squares are those of this
  /// rank's share of the result.
  WorkRef allreduceFused(const Tensors& tensors, const c10d::AllreduceOptions& opts,
                         const Fusion& fusion);
  /// As _reduce_scatter_base on the CPU, likewise. With a 16-bit wire dtype the output may be
  /// float32; then the sum is not rounded.
  WorkRef reduceScatterFused(const at::Tensor& output, const at::Tensor& input,
                             const c10d::ReduceScatterOptions& opts, const Fusion& fusion);
  WorkRef reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkRef allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkRef _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkRef allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkRef allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkRef gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) override;
  WorkRef gather_single(at::Tensor& output, at::Tensor& input,
                        const c10d::GatherOptions& opts) FASTCOLL_OVERRIDES_2_14;
  WorkRef scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override;
  WorkRef reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkRef _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkRef reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkRef alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& outputSplits,
                        std::vector<int64_t>& inputSplits,
                        const c10d::AllToAllOptions& opts) override;
  WorkRef alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;

  /// A scatter of one tensor, with a part of equal length for each rank.
  WorkRef scatterSingle(const at::Tensor& output, const at::Tensor& input,
                        const c10d::ScatterOptions& opts);

  // --- calls prepared for repetition (calls/launching.cpp)
  struct Prepared;
  /// Calls `call`, which makes one collective, or messages. A call of CPU tensors is checked but
  /// not run, and is returned; for others nullptr.
  std::shared_ptr<Prepared> prepare(const std::function<void()>& call);
  /// Whether run() may repeat it now; else the call must be made anew. Throws if a tensor has left
  /// its memory.
  bool canRun(const Prepared& prepared) const;
  /// Runs it, like the call that it was prepared from. From one thread at a time. After an
  /// exception it may still be queued, so it cannot run again.
  void run(Prepared& prepared);

  // --- barriers (calls/barriers.cpp)
  WorkRef barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) override;

  // --- point-to-point (calls/point_to_point.cpp)
  WorkRef send(Tensors& tensors, int destination, int tag) override;
  WorkRef recv(Tensors& tensors, int source, int tag) override;
  WorkRef recvAnysource(Tensors& tensors, int tag) override;
  /// One message of CPU tensors, or of a device's: returns no work once it has been waited for.
  WorkRef messageNow(const CallType& type, Tensors& tensors, int peer, int tag);
  /// Sends to one rank while it receives from another; returns when the message is received.
  WorkRef sendrecv(Tensors& sent, int target, Tensors& received, int source, int tag);
  void startCoalescing() override;
  WorkRef endCoalescing() override;
  /// Whether the calls of this thread are collected, between these two.
  bool collects() const { return coalescingThread_.load() == std::this_thread::get_id(); }

 private:
  /// What torch needs of a call besides its type and request.
  struct Call {
    bool async;
    std::chrono::milliseconds timeout;
    Tensors inputs;                                             // for the profiler
    Tensors outputs;                                            // value of the future
    std::shared_ptr<const AllReduceOptions> options = nullptr;  // for device tensors
  };

  // calls/traced.cpp
  void beginTrace();
  void endTrace();
  std::uint32_t traceGroup();
  static void pollGroups();
  /// Describes a collective to the trace. `device`: number it among the group's collectives on a
  /// device.
  void describe(trace::Record& draft, const TensorTask& task, const Call& call,
                bool device = false);
  void describeMessage(trace::Record& draft, const char* name, const at::Tensor& tensor, bool send,
                       int peer, int tag, bool device = false);
  /// Numbers the message and records it.
  trace::RecordId recordMessage(trace::Record& draft);
  trace::RecordId tracedMessage(const char* name, const at::Tensor& tensor, bool send, int peer,
                                int tag, bool device = false);
  trace::RecordId tracedMonitoredBarrier(std::chrono::milliseconds timeout);

  CallSite site(const char* name) const { return {name, &name_, rank_, size_}; }
  // The bodies of the calls, one for each shape.
  WorkRef allReduce(const CallSite& site, const Tensors& tensors,
                    const c10d::AllreduceOptions& opts, const Fusion* fusion = nullptr,
                    std::shared_ptr<const AllReduceOptions> onDevice = nullptr);
  WorkRef allGather(const CallSite& site, Tensors outputs, Tensors inputs,
                    const c10d::AllgatherOptions& opts);
  WorkRef allGatherLists(const CallSite& site, const std::vector<Tensors>& lists,
                         const Tensors& inputs, Tensors outputs,
                         const c10d::AllgatherOptions& opts);
  WorkRef reduceScatter(const CallSite& site, Tensors outputs, Tensors inputs,
                        const c10d::ReduceScatterOptions& opts, const Fusion* fusion = nullptr);
  WorkRef allToAll(std::shared_ptr<TensorTask> task, Call call);
  struct AwaitedMessage;
  /// `awaited`: the caller waits, so on CPU there may be no work, but this to await().
  WorkRef message(const CallType& type, Tensors& tensors, int peer, int tag,
                  AwaitedMessage* awaited = nullptr);
  void await(const std::shared_ptr<TensorMessage>& op);
  void runMessages(Prepared& prepared);
  void recordParameters(const Call& call, const char* name, std::uint64_t seq,
                        bool pointToPoint) const;
  WorkRef launch(std::shared_ptr<TensorTask> task, Call call);
  WorkRef launchPointToPoint(const CallSite& site, at::Tensor& tensor, int peer, int tag,
                             AwaitedMessage* awaited);
  WorkRef launchMessage(std::shared_ptr<TensorMessage> op, at::Tensor& tensor,
                        AwaitedMessage* awaited);
  /// Stages a message's tensor and posts the message.
  void post(const std::shared_ptr<TensorMessage>& op);
  bool collecting(WorkRef& work);
  void stopCollecting();
  /// Runs the body of a call and translates its exceptions to torch's. An exception also ends a
  /// batch under collection, which torch would not end.
  template <typename Body>
  WorkRef guarded(const CallType& type, Body body) {
    try {
      return body(CallSite{type.name, &name_, rank_, size_, &type});
    } catch (const Error& error) {
      stopCollecting();
      throwAsTorch(error);
    } catch (...) {
      stopCollecting();
      throw;
    }
  }
  // process_group_device.cpp
  std::shared_ptr<DeviceEngine> device() const;
  /// The device engine, if there is one. No other can be made after this call.
  std::shared_ptr<DeviceEngine> lastDeviceEngine(const std::string& why);
  DeviceEngine& deviceEngine(c10::DeviceType type);
  void throwIfOver() const;
  WorkRef launchOnDevice(std::shared_ptr<TensorTask> task, Call call, int pair = -1);
  WorkRef launchBatch();
  void splitDevice(int color, ProcessGroupFastcoll* child);
  static WeakRegistry<DeviceEngine>& deviceRegistry();
  std::function<void()> behindDevice(const c10d::BarrierOptions& opts);
  std::chrono::milliseconds timeoutOr(std::chrono::milliseconds given) const {
    return given == c10d::kUnsetTimeout ? options_->timeout : given;
  }
  /// The terms of a call that is made now.
  WorkTerms termsOf(std::chrono::milliseconds given) {
    WorkTerms terms{timeoutOr(given), timed_, nullptr};
    terms.extension = extensions_.extend(terms.timeout);
    return terms;
  }

  /// While set, the calls of this thread are stored here and not run.
  static thread_local Prepared* preparing_;

  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<Options> options_;
  std::string name_;
  const std::shared_ptr<AbortHooks> abortHooks_ = std::make_shared<AbortHooks>();
  TimeoutExtensions extensions_;
  std::shared_ptr<CpuEngine> engine_;
  std::atomic<std::uint64_t> messages_{0};
  /// FASTCOLL_DEBUG=TRACE: count every output as changed, for autograd.
  const bool countsAllChanges_ = logLevel() == LogLevel::Trace;

  std::mutex traceMutex_;
  std::atomic<std::uint32_t> traceGroup_{0};  // 0: no call yet
  std::atomic<std::uint64_t> deviceCalls_{0};
  std::atomic<std::uint64_t> monitored_{0};
  const std::shared_ptr<MessageNumbers> messageNumbers_ = std::make_shared<MessageNumbers>();

  std::mutex coalescingMutex_;
  /// Between startCoalescing and endCoalescing. A thread looks for its own id without the lock.
  std::atomic<std::thread::id> coalescingThread_{std::thread::id()};
  std::vector<WorkRef> coalesced_;
  std::vector<DeviceCall> batch_;  // calls on a device since startCoalescing

  const std::uint64_t forkGeneration_ = forkGeneration();
  std::mutex deviceMaking_;  // taken before deviceMutex_, which is free during calls of Python
  mutable std::mutex deviceMutex_;
  std::shared_ptr<DeviceEngine> device_;  // made at the first tensor on a device
  std::optional<c10::Device> lastDevice_;
  std::atomic<bool> refused_{false};     // a device call was refused: the group had failed
  std::atomic<bool> usesDevice_{false};  // lastDevice_ or bound_ is set
  std::optional<c10::Device> bound_;     // the one that torch has bound this process to
  std::atomic<bool> timed_{false};
  std::string over_;  // why no device engine can be made any more

  std::mutex splitMutex_;
  std::atomic<std::uint64_t> splits_{0};
  std::string lastSplit_;  // name of the last group split off
  std::optional<c10::weak_intrusive_ptr<c10d::Backend>> lastSplitGroup_;
  c10::intrusive_ptr<c10d::Store> lastMerge_;  // store of the last merge
  std::optional<c10::weak_intrusive_ptr<c10d::Backend>> lastMergeGroup_;
};

}  // namespace fastcoll
