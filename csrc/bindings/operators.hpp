// What the kernels and the gradients of torch.ops.fastcoll share.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>

namespace fastcoll::operators {

/// Throws ValueError: "torch.ops.fastcoll.all_reduce: expected ..., got ...".
[[noreturn]] void refuseCall(const char* call, const std::string& expected, const std::string& got);

/// Returns the operation of that name: sum, avg, product, min, max, band, bor or bxor.
c10d::ReduceOp reduceOp(const char* call, const std::string& name);

}  // namespace fastcoll::operators
