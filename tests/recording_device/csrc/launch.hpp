// One operator on the device: its stream, and the memory that it touches.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <string>
#include <vector>

#include "current.hpp"
#include "recorder.hpp"

namespace recording {

// Operators that run while a Launch lives in its thread, such as a fallback's copies to and from
// CPU, are part of it and not reported separately.
class Launch {
 public:
  Launch(std::string what, c10::Device device);
  ~Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  // Undefined tensors and tensors of other devices are skipped.
  void read(const at::Tensor& tensor) { add(tensor, false); }
  void write(const at::Tensor& tensor) { add(tensor, true); }
  // Reports the launch. Without this call, as when the operator throws, nothing is reported.
  void done();
  // Makes the host wait for the stream.
  void synchronize() const;

  StreamIndex stream() const { return stream_; }

 private:
  void add(const at::Tensor& tensor, bool write);
  bool outermost() const;

  const std::string what_;
  const c10::DeviceGuard guard_;
  const StreamIndex stream_;
  std::vector<Access> accesses_;
};

// A CPU tensor on the same memory.
at::Tensor onCpu(const at::Tensor& tensor);

bool isRecording(const at::Tensor& tensor);

// Grows or shrinks the memory, as storage.resize_ does.
void resizeStorage(const c10::Storage& storage, size_t bytes);

}  // namespace recording
