// Turns tensors into messages. Checks which are allowed, describes their elements' layout, and
// copies those that are not contiguous.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/cpu_engine.hpp"

namespace fastcoll {

DType dtypeOf(at::ScalarType type);

/// Identifies a call in error messages; formatted only when one is needed.
struct CallSite {
  const char* name;  // "all_reduce"
  const std::string* group;
  int rank;
  int size;
  /// "fastcoll.all_reduce [group 'g', rank 3/8]: "
  std::string prefix() const;
};

/// Whether a tensor shares memory with those of a list; being the one at `own` does not count.
bool sharesMemory(const at::Tensor& tensor, const std::vector<at::Tensor>& list, std::size_t own);

/// A collective over tensors. It keeps them alive and stages those that are not one run of memory:
/// inputs are copied before the transfer, outputs after it, on the thread that runs it.
class TensorTask : public Task {
 public:
  explicit TensorTask(CallSite call) : call_(call) {}

  /// Several requests, for several dtypes or uneven pieces. While empty, `request` alone is used.
  std::vector<Request> parts;

  /// Adds the bytes of a tensor that is read. `apart`: adds a copy, apart from the other tensors.
  void addInput(Message& message, const at::Tensor& tensor, bool apart = false);
  /// Adds the bytes of a tensor that is written; throws Error(Value) if its elements overlap.
  void addOutput(Message& message, const at::Tensor& tensor, bool apart = false);
  /// Adds a list of tensors, one for each rank; `even`: all have one length. Devices then get them
  /// in a row, copied if needed, because NCCL moves a row by one call.
  void addInputs(const std::vector<at::Tensor>& tensors, bool even);
  void addOutputs(const std::vector<at::Tensor>& tensors, bool even);
  /// Adds one tensor that is read and written in place.
  void addInPlace(Message& in, Message& out, const at::Tensor& tensor);

  /// The device of all its tensors; nullopt while there are none.
  std::optional<c10::Device> device() const { return device_; }
  /// Tensors that keep the memory alive which the transfer and finish() touch.
  std::vector<at::Tensor> memoryOf() const;
  /// Keeps another tensor alive, whose memory the transfer uses.
  void keepAlive(const at::Tensor& tensor) { alive_.push_back(tensor); }
  /// Called before all else, on the thread that runs the transfer.
  std::function<void()> before;
  /// Whether finish() counts the outputs as changed: autograd then refuses to use what it saved of
  /// them.
  bool countsChanges = false;
  /// Whether the stock backend counts the outputs of such a call as changed. Gloo does so for
  /// outputs that it copies out of its own buffers, NCCL only for all_gather's list. Scripts rely
  /// on both, call by call: on a stock backend, a script may use a tensor in backward that a
  /// collective has changed.
  bool countsChangesInStock(c10d::OpType type) const;

  void prepare() override;
  void transfer(const RunOne& runOne) override;
  void finish() override;

 private:
  struct Copy {
    at::Tensor from;
    at::Tensor to;
  };
  void admit(const at::Tensor& tensor);
  /// A row of memory with a part for each of the tensors; empty if they need none.
  std::vector<at::Tensor> rowFor(const std::vector<at::Tensor>& tensors, bool even);

  CallSite call_;
  std::optional<c10::Device> device_;
  std::vector<at::Tensor> alive_;
  std::vector<at::Tensor> written_;
  std::vector<Copy> before_;
  std::vector<Copy> after_;
};

/// Cuts a message of one run of memory into `parts` messages of equal length.
void cut(const Message& whole, int parts, std::vector<Message>& into);
/// Throws Error(Value) unless the tensor is dense, with memory on a device that an engine serves.
void requireDense(const CallSite& call, const at::Tensor& tensor);
/// Whether the device engine serves a device type: CUDA; a test adds its own.
bool isServed(c10::DeviceType type);
void serve(c10::DeviceType type);
/// Throws Error(Value) if two elements of the tensor share memory. In-place collectives check it on
/// every rank, even if the rank only reads, so all ranks raise the same error.
void requireNoOverlap(const CallSite& call, const at::Tensor& tensor);

}  // namespace fastcoll
