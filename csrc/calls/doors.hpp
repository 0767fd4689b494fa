// The doors of a group: torch's calls. Each checks its arguments and returns the checked call. It
// sends nothing, so an error leaves the group as it was.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/log.hpp"
#include "calls/call.hpp"
#include "calls/reduction.hpp"

namespace fastcoll {

/// A call, or a send with the receive that a communicator runs beside it.
struct Calls {
  Calls(CallRef one, CallRef other = nullptr)  // NOLINT(google-explicit-constructor)
      : call(std::move(one)), receive(std::move(other)) {}
  CallRef call;
  CallRef receive;  // of a sendrecv
};

class Doors {
 public:
  /// `fixedOrder`: the group sums in a fixed order. The name must outlive this and its calls.
  Doors(const std::string& group, int rank, int size, bool fixedOrder)
      : group_(&group), rank_(rank), size_(size), fixedOrder_(fixedOrder) {}

  // --- all_reduce.cpp, sparse.cpp
  CallRef allReduce(Tensors& tensors, const c10d::AllreduceOptions& opts) const;
  /// As allReduce of one CPU tensor, but into another tensor, which does not overlap it.
  CallRef allReduceInto(const at::Tensor& output, const at::Tensor& input,
                        const c10d::AllreduceOptions& opts) const;
  CallRef allReduceSparse(Tensors& tensors, const c10d::AllreduceOptions& opts) const;
  CallRef allReduceCoalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) const;
  /// As allReduceCoalesced; the tensors may have several dtypes. `squares`: the memory that the
  /// options name.
  CallRef allReduceList(const Tensors& tensors, const c10d::AllreduceOptions& opts,
                        std::shared_ptr<const AllReduceOptions> onDevice,
                        const std::optional<at::Tensor>& squares) const;
  /// As allReduce of all tensors, which have one dtype and are on the CPU. Those that travel in
  /// another dtype are summed in float32 and rounded once more. The squares are those of this
  /// rank's share of the result.
  CallRef allReduceFused(const Tensors& tensors, const c10d::AllreduceOptions& opts,
                         const Fusion& fusion) const;

  // --- reduce_scatter.cpp
  CallRef reduceScatter(Tensors& outputs, std::vector<Tensors>& inputs,
                        const c10d::ReduceScatterOptions& opts) const;
  CallRef reduceScatterTensor(const at::Tensor& output, const at::Tensor& input,
                              const c10d::ReduceScatterOptions& opts) const {
    return scatterSums(at(calls::ReduceScatterTensor), {output}, {input}, opts);
  }
  CallRef reduceScatterCoalesced(Tensors& outputs, Tensors& inputs,
                                 const c10d::ReduceScatterOptions& opts) const {
    return scatterSums(at(calls::ReduceScatterTensorCoalesced), outputs, inputs, opts);
  }
  /// As reduceScatterTensor on the CPU, fused. With a 16-bit wire dtype the output may be float32;
  /// then the sum is not rounded.
  CallRef reduceScatterFused(const at::Tensor& output, const at::Tensor& input,
                             const c10d::ReduceScatterOptions& opts, const Fusion& fusion) const {
    return scatterSums(at(calls::ReduceScatterFused), {output}, {input}, opts, &fusion);
  }

  // --- all_gather.cpp
  CallRef allGather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) const;
  CallRef allGatherIntoTensor(const at::Tensor& output, const at::Tensor& input,
                              const c10d::AllgatherOptions& opts) const {
    return gatherTensors(at(calls::AllGatherIntoTensor), {output}, {input}, opts);
  }
  CallRef allGatherCoalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                             const c10d::AllgatherOptions& opts) const;
  CallRef allGatherIntoTensorCoalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& opts) const {
    return gatherTensors(at(calls::AllGatherIntoTensorCoalesced), outputs, inputs, opts);
  }

  // --- rooted.cpp
  CallRef broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) const;
  CallRef reduce(Tensors& tensors, const c10d::ReduceOptions& opts) const;
  CallRef gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) const;
  CallRef gatherSingle(const at::Tensor& output, const at::Tensor& input,
                       const c10d::GatherOptions& opts) const;
  CallRef scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) const;
  /// A scatter of one tensor, with a part of equal length for each rank.
  CallRef scatterSingle(const at::Tensor& output, const at::Tensor& input,
                        const c10d::ScatterOptions& opts) const;

  // --- all_to_all.cpp
  CallRef allToAll(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) const;
  CallRef allToAllSingle(const at::Tensor& output, const at::Tensor& input,
                         const std::vector<int64_t>& outputSplits,
                         const std::vector<int64_t>& inputSplits,
                         const c10d::AllToAllOptions& opts) const;

  CallRef barrier(const c10d::BarrierOptions& opts) const {
    auto call = std::make_shared<Call>(at(calls::Barrier));
    call->behind = opts.device;
    if (!opts.device_ids.empty()) {
      call->behindIndex = static_cast<c10::DeviceIndex>(opts.device_ids[0]);
    }
    return asked(std::move(call), opts, {}, {});
  }

  // --- point_to_point.cpp
  CallRef send(Tensors& tensors, int destination, int tag) const {
    return message(calls::Send, tensors, destination, tag);
  }
  CallRef recv(Tensors& tensors, int source, int tag) const {
    return message(calls::Recv, tensors, source, tag);
  }
  CallRef recvAnySource(Tensors& tensors, int tag) const {
    return message(calls::RecvAny, tensors, kAnySource, tag);
  }
  /// A message to one rank while one is received from another.
  Calls sendrecv(Tensors& sent, int destination, Tensors& received, int source, int tag) const {
    CallRef receive = recv(received, source, tag);
    return {send(sent, destination, tag), std::move(receive)};
  }

 private:
  CallSite at(const CallType& type) const { return {type.name, group_, rank_, size_, &type}; }
  /// Adds what torch asks besides the request.
  template <typename Options>
  static CallRef asked(CallRef call, const Options& opts, Tensors inputs, Tensors outputs) {
    const CountsChanges counts = call->site.type->countsChanges;
    call->countsChanges = logLevel() == LogLevel::Trace || counts == CountsChanges::Always ||
                          (counts == CountsChanges::OnCpu && !call->onDevice());
    call->async = opts.asyncOp;
    call->timeout = opts.timeout;
    call->inputs = std::move(inputs);
    call->outputs = std::move(outputs);
    return call;
  }
  // The bodies of calls of one shape.
  CallRef reduceAll(const CallSite& site, const Tensors& tensors,
                    const c10d::AllreduceOptions& opts, const Fusion* fusion = nullptr) const;
  CallRef gatherTensors(const CallSite& site, Tensors outputs, Tensors inputs,
                        const c10d::AllgatherOptions& opts) const;
  CallRef gatherLists(const CallSite& site, const std::vector<Tensors>& lists,
                      const Tensors& inputs, Tensors outputs,
                      const c10d::AllgatherOptions& opts) const;
  CallRef scatterSums(const CallSite& site, Tensors outputs, Tensors inputs,
                      const c10d::ReduceScatterOptions& opts, const Fusion* fusion = nullptr) const;
  CallRef exchange(CallRef call, const c10d::AllToAllOptions& opts, Tensors inputs,
                   Tensors outputs) const;
  CallRef message(const CallType& type, Tensors& tensors, int peer, int tag) const;

  const std::string* const group_;
  const int rank_;
  const int size_;
  const bool fixedOrder_;
};

}  // namespace fastcoll
