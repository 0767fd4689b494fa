// One operation of torch.distributed, checked. A door (calls/doors.hpp) makes it. The process group
// then runs it at once, queues it, or keeps it as a plan.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include <functional>
#include <memory>
#include <optional>

#include "base/exported.hpp"
#include "cpu/cpu_engine.hpp"
#include "torch/device_engine.hpp"
#include "torch/tensors.hpp"
#include "torch/timeout_extensions.hpp"

namespace fastcoll {

/// It keeps its tensors alive and stages those that are not one run of memory: inputs are copied
/// before the transfer, outputs after it, on the thread that runs it.
class Call : public Task {
 public:
  /// `share`: the tensors whose dtype and total length all ranks compare.
  explicit Call(const CallSite& call, at::ArrayRef<at::Tensor> share = {});

  CallSite site;
  /// Several requests, for several dtypes or uneven pieces. While empty, `request` alone is used.
  std::vector<Request> parts;

  // What torch asks besides the request.
  bool async = false;
  std::chrono::milliseconds timeout{};  // as it was given, so perhaps c10d's kUnsetTimeout
  Tensors inputs;                       // for the profiler
  Tensors outputs;                      // value of the future
  std::shared_ptr<const AllReduceOptions> options;  // for device tensors
  /// Of a barrier: whose stream it waits for, and the index of that device if only that was named.
  std::optional<c10::Device> behind;
  std::optional<c10::DeviceIndex> behindIndex;

  // Of a launch on a device with streams.
  WorkTerms terms;
  /// The stream that was current when the call was made. It orders the memory of the call's
  /// tensors.
  std::optional<c10::Stream> callers;
  bool batched = false;  // launched with others, as one operation

  bool sends() const { return request.collective == Collective::Send; }
  bool isMessage() const { return sends() || request.collective == Collective::Recv; }

  /// Adds the bytes of a tensor: to `in` if it is read, to `out` if it is written. `copy`: adds a
  /// copy of it. Throws Error(Value) if it is written and its elements overlap.
  void add(const at::Tensor& tensor, Message* in, Message* out, bool copy = false);
  /// Adds a tensor to the request's only input message, to its only output message, or to both.
  void addInput(const at::Tensor& tensor, bool copy = false) {
    request.in.resize(1);
    add(tensor, &request.in[0], nullptr, copy);
  }
  void addOutput(const at::Tensor& tensor, bool copy = false) {
    request.out.resize(1);
    add(tensor, nullptr, &request.out[0], copy);
  }
  void addInPlace(const at::Tensor& tensor) {
    request.in.resize(1);
    request.out.resize(1);
    add(tensor, &request.in[0], &request.out[0]);
  }
  enum class Side { In, Out };
  /// Adds a list of tensors, one for each rank; `even`: all have one length. Devices then get them
  /// in a row, copied if needed, because NCCL moves a row by one call.
  void addList(Side side, const Tensors& tensors, bool even);
  /// Adds one tensor, with a part of equal length for each rank.
  void addParts(Side side, const at::Tensor& whole);

  /// The device of all its tensors; nullopt while there are none.
  std::optional<c10::Device> device() const { return device_; }
  bool onDevice() const { return device_ && !device_->is_cpu(); }
  /// Tensors that keep the memory alive which the transfer and finish() touch.
  FASTCOLL_EXPORTED Tensors memoryOf() const;
  /// Keeps another tensor alive, whose memory the transfer uses.
  void keepAlive(const at::Tensor& tensor) { alive_.push_back(tensor); }
  /// Called before all else, on the thread that runs the transfer.
  std::function<void()> before;
  /// Whether finish() counts the outputs as changed, for autograd: as the stock backends do, or
  /// always, with FASTCOLL_DEBUG=TRACE.
  bool countsChanges = false;

  void run(CpuEngine& engine) override;
  /// Before and after the transfer: copy tensors that are not one run of memory in and out.
  void prepare();
  FASTCOLL_EXPORTED void finish();

 protected:
  /// Frees the tensors of a call that is done.
  void forget();

 private:
  struct Copy {
    at::Tensor from;
    at::Tensor to;
  };
  void admit(const at::Tensor& tensor);
  /// A row of memory with a part for each of the tensors; empty if they need none.
  Tensors rowFor(const Tensors& tensors, bool even);
  std::vector<Message>& messagesOf(Side side) {
    return side == Side::In ? request.in : request.out;
  }
  void add(Side side, const at::Tensor& tensor, Message& message) {
    add(tensor, side == Side::In ? &message : nullptr, side == Side::Out ? &message : nullptr);
  }

  std::optional<c10::Device> device_;
  Tensors alive_;
  Tensors written_;
  std::vector<Copy> before_;
  std::vector<Copy> after_;
};

}  // namespace fastcoll
