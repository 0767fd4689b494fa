// What a reducing call adds to its request: the operation, and what it fuses with it.
#pragma once

#include <optional>

#include "calls/call.hpp"

namespace fastcoll {

/// What all_reduce_fused and reduce_scatter_fused do in the pass of the reduction itself. They take
/// CPU tensors.
struct Fusion {
  std::optional<at::ScalarType> wire;  // the dtype in which float32 travels
  std::optional<at::Tensor> squares;   // one float64 for the sum of the result's squares
};

/// Sets the operation. Call it after the tensors are added.
void setReduction(Call& call, Request& request, const c10d::ReduceOp& op);
/// Sets the dtype that travels, for inputs of `dtype`, and returns an empty message for them.
Message setWire(const Call& call, Request& request, DType dtype, const Fusion& fusion);
/// Requests the squares of a result of `dtype`. Call it after the tensors are added.
void setSquares(Call& call, DType dtype, const Fusion& fusion);

}  // namespace fastcoll
