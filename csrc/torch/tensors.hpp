// Turns tensors into messages. Checks which are allowed, describes their elements' layout, and
// copies those that are not contiguous.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "calls/call_type.hpp"
#include "cpu/cpu_engine.hpp"

namespace fastcoll {

DType dtypeOf(at::ScalarType type);

/// Identifies a call in error messages; formatted only when one is needed.
struct CallSite {
  const char* name;  // "all_reduce"
  const std::string* group;
  int rank;
  int size;
  const CallType* type = nullptr;  // of a collective or message
  /// "fastcoll.all_reduce [group 'g', rank 3/8]: "
  ErrorSite errorSite() const;
};

/// Throws. Call it only after a check has failed, so other calls build no error text.
[[noreturn]] inline void refuse(const CallSite& site, const std::string& expected,
                                const std::string& got) {
  throw Error(ErrorKind::Value, site.errorSite(), "expected ", expected, ", got ", got);
}

/// Whether a tensor shares memory with those of a list; being the one at `own` does not count.
bool sharesMemory(const at::Tensor& tensor, const std::vector<at::Tensor>& list, std::size_t own);

/// A collective over tensors. It keeps them alive and stages those that are not one run of memory:
/// inputs are copied before the transfer, outputs after it, on the thread that runs it.
class TensorTask : public Task {
 public:
  /// A task of that type. `share`: the tensors whose dtype and total length all ranks compare.
  explicit TensorTask(const CallSite& call, at::ArrayRef<at::Tensor> share = {});

  CallSite site;
  /// Several requests, for several dtypes or uneven pieces. While empty, `request` alone is used.
  std::vector<Request> parts;

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
  /// Adds a list of tensors, one for each rank; `even`: all have one length. Devices then get them
  /// in a row, copied if needed, because NCCL moves a row by one call.
  void addInputs(const std::vector<at::Tensor>& tensors, bool even);
  void addOutputs(const std::vector<at::Tensor>& tensors, bool even);
  /// Adds one tensor, with a part of equal length for each rank.
  void addInputParts(const at::Tensor& whole);
  void addOutputParts(const at::Tensor& whole);

  /// The device of all its tensors; nullopt while there are none.
  std::optional<c10::Device> device() const { return device_; }
  bool onDevice() const { return device_ && !device_->is_cpu(); }
  /// Tensors that keep the memory alive which the transfer and finish() touch.
  std::vector<at::Tensor> memoryOf() const;
  /// Keeps another tensor alive, whose memory the transfer uses.
  void keepAlive(const at::Tensor& tensor) { alive_.push_back(tensor); }
  /// Called before all else, on the thread that runs the transfer.
  std::function<void()> before;
  /// Whether finish() counts the outputs as changed.
  bool countsChanges = false;

  void run(CpuEngine& engine) override;
  /// Before and after the transfer: copy tensors that are not one run of memory in and out.
  void prepare();
  void finish();

 private:
  struct Copy {
    at::Tensor from;
    at::Tensor to;
  };
  void admit(const at::Tensor& tensor);
  /// A row of memory with a part for each of the tensors; empty if they need none.
  std::vector<at::Tensor> rowFor(const std::vector<at::Tensor>& tensors, bool even);
  /// Cuts a message of one run of memory, and adds a part to the message of each rank.
  void cut(const Message& whole, std::vector<Message>& into);

  std::optional<c10::Device> device_;
  std::vector<at::Tensor> alive_;
  std::vector<at::Tensor> written_;
  std::vector<Copy> before_;
  std::vector<Copy> after_;
};

/// Throws Error(Value) unless the tensor is dense, with memory on a device that an engine serves.
void requireDense(const CallSite& call, const at::Tensor& tensor);
/// Whether the device engine serves a device type: CUDA; a test adds its own.
bool isServed(c10::DeviceType type);
void serve(c10::DeviceType type);
/// Throws Error(Value) if two elements of the tensor share memory. In-place collectives check it on
/// every rank, even if the rank only reads, so all ranks raise the same error.
void requireNoOverlap(const CallSite& call, const at::Tensor& tensor);

}  // namespace fastcoll
