// The c10d::Backend of fastcoll. A door checks each call, and the engine of its tensors' device
// executes it.
//
// process_group.cpp         life, options, groups, abort
// process_group_device.cpp  launching on a device with streams
// calls/doors.hpp           the checks of calls
// calls/launching.cpp       their launch on the CPU; messages: calls/point_to_point.cpp
// calls/group_trace.hpp     their records in the trace
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "calls/batch.hpp"
#include "calls/doors.hpp"
#include "calls/group_trace.hpp"
#include "cpu/abort_hooks.hpp"
#include "cpu/cpu_engine.hpp"
#include "torch/error.hpp"
#include "torch/group_device.hpp"
#include "torch/options.hpp"
#include "torch/timeout_extensions.hpp"
#include "torch/work.hpp"

namespace fastcoll {

using WorkRef = c10::intrusive_ptr<c10d::Work>;

class MessageCall;
struct Plan;

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
    if (const auto engine = device_->made()) engine->setTimeout(timeout);
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
  /// Ends all groups of this process, at exit.
  static void shutdownAll();

  // --- calls (calls/doors.hpp)
  const Doors& doors() const { return *doors_; }
  /// Checks a call by its door and starts it. Translates exceptions to torch's.
  template <typename Door, typename... Arguments>
  WorkRef launch(Door door, Arguments&&... arguments) {
    return guarded([&] { return start(std::invoke(door, *doors_, arguments...)); });
  }
  WorkRef broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return launch(&Doors::broadcast, tensors, opts);
  }
  WorkRef allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return launch(&Doors::allReduce, tensors, opts);
  }
  WorkRef allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return launch(&Doors::allReduceSparse, tensors, opts);
  }
  WorkRef allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override {
    return launch(&Doors::allReduceCoalesced, tensors, opts);
  }
  WorkRef reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return launch(&Doors::reduce, tensors, opts);
  }
  WorkRef allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override {
    return launch(&Doors::allGather, outputs, inputs, opts);
  }
  WorkRef _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override {
    return launch(&Doors::allGatherIntoTensor, output, input, opts);
  }
  WorkRef allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override {
    return launch(&Doors::allGatherCoalesced, outputs, inputs, opts);
  }
  WorkRef allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    return launch(&Doors::allGatherIntoTensorCoalesced, outputs, inputs, opts);
  }
  WorkRef gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) override {
    return launch(&Doors::gather, outputs, inputs, opts);
  }
  WorkRef gather_single(at::Tensor& output, at::Tensor& input,
                        const c10d::GatherOptions& opts) FASTCOLL_OVERRIDES_2_14 {
    return launch(&Doors::gatherSingle, output, input, opts);
  }
  WorkRef scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override {
    return launch(&Doors::scatter, outputs, inputs, opts);
  }
  WorkRef reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    return launch(&Doors::reduceScatter, outputs, inputs, opts);
  }
  WorkRef _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override {
    return launch(&Doors::reduceScatterTensor, output, input, opts);
  }
  WorkRef reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    return launch(&Doors::reduceScatterCoalesced, outputs, inputs, opts);
  }
  WorkRef alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& outputSplits,
                        std::vector<int64_t>& inputSplits,
                        const c10d::AllToAllOptions& opts) override {
    return launch(&Doors::allToAllSingle, output, input, outputSplits, inputSplits, opts);
  }
  WorkRef alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return launch(&Doors::allToAll, outputs, inputs, opts);
  }
  WorkRef barrier(const c10d::BarrierOptions& opts) override {
    return launch(&Doors::barrier, opts);
  }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) override;
  WorkRef send(Tensors& tensors, int destination, int tag) override {
    return launch(&Doors::send, tensors, destination, tag);
  }
  WorkRef recv(Tensors& tensors, int source, int tag) override {
    return launch(&Doors::recv, tensors, source, tag);
  }
  WorkRef recvAnysource(Tensors& tensors, int tag) override {
    return launch(&Doors::recvAnySource, tensors, tag);
  }
  void startCoalescing() override { batch_.begin(); }
  WorkRef endCoalescing() override;
  /// Whether the calls of this thread are collected, between these two.
  bool collects() const { return batch_.collects(); }

  // --- a communicator's calls (calls/launching.cpp). `check(doors)` returns its Calls.
  /// Runs a blocking call: returns no work if it has ended.
  template <typename Check>
  WorkRef run(Check&& check) {
    return guarded([&] { return runNow(check(*doors_)); });
  }
  /// Checks the call and keeps it for repetition; returns nullptr for a message of a device tensor.
  template <typename Check>
  std::shared_ptr<Plan> plan(Check&& check) {
    return guarded([&] { return planOf(check(*doors_)); });
  }
  /// Whether repeat() may run it now; else the call must be made anew. Throws if a tensor has left
  /// its memory.
  bool canRepeat(const Plan& plan) const;
  /// Runs the call again. From one thread at a time. After an exception it may still be queued, so
  /// it cannot run again.
  void repeat(Plan& plan);

 private:
  CallSite site(const char* name) const { return {name, &name_, rank_, size_}; }
  // calls/launching.cpp
  void describe(Call& call) { trace_->describe(call, timeoutOr(call.timeout)); }
  WorkRef start(const CallRef& call);
  WorkRef startCollective(const CallRef& call);
  WorkRef runNow(const Calls& calls);
  std::shared_ptr<Plan> planOf(const Calls& calls);
  void recordParameters(const Call& call, const Tensors& inputs, const Tensors& outputs,
                        const char* name, std::uint64_t seq) const;
  // calls/point_to_point.cpp
  WorkRef startMessage(const std::shared_ptr<MessageCall>& call);
  WorkRef runMessages(const Calls& calls);
  void repeatMessages(const Plan& plan);
  template <typename Body>
  auto numbered(MessageCall& call, const WorkTerms& terms, Body body) -> decltype(body());
  /// Stages the message's tensor and posts the message; `awaited`: await() comes next.
  void post(const std::shared_ptr<MessageCall>& call);
  void postAwaited(const std::shared_ptr<MessageCall>& call, const WorkTerms& terms);
  void await(const std::shared_ptr<MessageCall>& call);
  void stopCollecting();
  /// Translates exceptions to torch's. An exception also ends a batch under collection, which torch
  /// would not end.
  template <typename Body>
  auto guarded(Body body) -> decltype(body()) {
    try {
      return translated(body);
    } catch (...) {
      stopCollecting();
      throw;
    }
  }
  // process_group_device.cpp
  WorkRef launchOnDevice(DeviceLaunch& launch);
  WorkRef launchBatch(std::vector<CallRef> calls);
  void splitDevice(int color, ProcessGroupFastcoll* child);
  std::function<void()> behindDevice(const Call& barrier);
  std::chrono::milliseconds timeoutOr(std::chrono::milliseconds given) const {
    return given == c10d::kUnsetTimeout ? options_->timeout : given;
  }
  /// The terms of a call that is made now.
  WorkTerms termsOf(std::chrono::milliseconds given) {
    WorkTerms terms{timeoutOr(given), timed_, nullptr};
    terms.extension = extensions_.extend(terms.timeout);
    return terms;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<Options> options_;
  std::string name_;
  const std::shared_ptr<AbortHooks> abortHooks_ = std::make_shared<AbortHooks>();
  TimeoutExtensions extensions_;
  std::shared_ptr<CpuEngine> engine_;
  std::atomic<std::uint64_t> messages_{0};
  std::optional<Doors> doors_;

  std::optional<GroupTrace> trace_;
  Batch batch_;
  std::optional<GroupDevice> device_;
  std::atomic<bool> timed_{false};

  std::mutex splitMutex_;
  std::atomic<std::uint64_t> splits_{0};
  std::string lastSplit_;  // name of the last group split off
  std::optional<c10::weak_intrusive_ptr<c10d::Backend>> lastSplitGroup_;
  c10::intrusive_ptr<c10d::Store> lastMerge_;  // store of the last merge
  std::optional<c10::weak_intrusive_ptr<c10d::Backend>> lastMergeGroup_;
};

}  // namespace fastcoll
