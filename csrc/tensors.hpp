// From tensors to messages: which are allowed, how their elements are laid out, and the copies that
// make the others contiguous.
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

/// Which call this is, for error messages; formatted only when one is needed.
struct CallSite {
  const char* name;  // "all_reduce"
  const std::string* group;
  int rank;
  int size;
  /// "fastcoll.all_reduce [group 'g', rank 3/8]: "
  std::string prefix() const;
};

/// Whether a tensor shares memory with those of a list otherwise than by being the one at `own`.
bool sharesMemory(const at::Tensor& tensor, const std::vector<at::Tensor>& list, std::size_t own);

/// A collective over tensors. Keeps them alive, and stages those that do not lie in one run of
/// memory: inputs are copied before the transfer, outputs after it, on the thread that runs it.
class TensorTask : public Task {
 public:
  explicit TensorTask(CallSite call) : call_(call) {}

  /// Tensors of several dtypes make several requests; `request` alone is used while this is empty.
  std::vector<Request> parts;

  /// The bytes of a tensor that is read; of a copy if it is to be `apart` from the others.
  void addInput(Message& message, const at::Tensor& tensor, bool apart = false);
  /// The bytes of a tensor that is written; throws Error(Value) if its elements overlap.
  void addOutput(Message& message, const at::Tensor& tensor, bool apart = false);
  /// A list of tensors, one for each rank; `even`: all as long as each other. Then devices get them
  /// in a row, copied if they do not lie so, because NCCL moves a row by one call.
  void addInputs(const std::vector<at::Tensor>& tensors, bool even);
  void addOutputs(const std::vector<at::Tensor>& tensors, bool even);
  /// One tensor read and written in place.
  void addInPlace(Message& in, Message& out, const at::Tensor& tensor);

  /// Where all its tensors are; nullopt while there are none.
  std::optional<c10::Device> device() const { return device_; }
  /// What keeps the memory alive that the transfer and finish() touch.
  std::vector<at::Tensor> memoryOf() const;
  /// Another tensor whose memory the transfer reads.
  void keepAlive(const at::Tensor& tensor) { alive_.push_back(tensor); }
  /// Called before all else, on the thread that runs the transfer.
  std::function<void()> before;
  /// Whether finish() counts the outputs as changed, so that autograd refuses to use what it saved
  /// of them.
  bool countsChanges = false;
  /// Whether stock backends tell autograd so of such a call: Gloo of what it copies out of buffers
  /// of its own, NCCL of all_gather's list alone. Scripts rely on both, call by call: one that runs
  /// on them may use a tensor in backward that a collective has changed.
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
  /// A row with a part for each of the tensors; none where they need no row.
  std::vector<at::Tensor> rowFor(const std::vector<at::Tensor>& tensors, bool even);

  CallSite call_;
  std::optional<c10::Device> device_;
  std::vector<at::Tensor> alive_;
  std::vector<at::Tensor> written_;
  std::vector<Copy> before_;
  std::vector<Copy> after_;
};

/// Cuts a message that lies in one run into `parts` messages of the same length.
void cut(const Message& whole, int parts, std::vector<Message>& into);
/// Throws Error(Value) unless the tensor is dense, with memory on a device that an engine serves.
void requireDense(const CallSite& call, const at::Tensor& tensor);
/// The device types beside the CPU whose tensors are served: CUDA; a test adds its own.
bool isServed(c10::DeviceType type);
void serve(c10::DeviceType type);
/// Throws Error(Value) if two elements of the tensor lie in the same place. In-place collectives
/// check it on every rank, those that only read included, so that all ranks see the same error.
void requireNoOverlap(const CallSite& call, const at::Tensor& tensor);

}  // namespace fastcoll
