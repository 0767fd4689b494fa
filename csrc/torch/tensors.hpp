// What tensors a call takes, how errors name the call, and which tensors share memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "calls/call_type.hpp"

namespace fastcoll {

using Tensors = std::vector<at::Tensor>;

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
bool sharesMemory(const at::Tensor& tensor, const Tensors& list, std::size_t own);
/// Whether tensors of equal length are consecutive in memory.
bool lieInARow(const Tensors& tensors);
/// Whether the elements are not one run of memory that can be read as it is.
bool needsStaging(const at::Tensor& tensor);

/// Throws Error(Value) unless the tensor is dense, with memory on a device that an engine serves.
void requireDense(const CallSite& call, const at::Tensor& tensor);
/// Whether the device engine serves a device type: CUDA; a test adds its own.
bool isServed(c10::DeviceType type);
void serve(c10::DeviceType type);
/// Throws Error(Value) if two elements of the tensor share memory. In-place collectives check it on
/// every rank, even if the rank only reads, so all ranks raise the same error.
void requireNoOverlap(const CallSite& call, const at::Tensor& tensor);

}  // namespace fastcoll
