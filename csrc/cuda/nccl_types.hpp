// NCCL's numbers of element types and reductions, from its public header. A complex number travels
// as two floats, a bool as a byte of 0 or 1. A dtype without an NCCL type can be moved, as bytes,
// but not reduced.
#pragma once

#include <cstddef>
#include <optional>

#include "base/dtype.hpp"

namespace fastcoll::nccl {

// ncclRedOp_t. Operations made for a factor have higher numbers.
constexpr int kSum = 0;
constexpr int kAvg = 4;
constexpr int kMadeForFactor = -1;  // NCCL sets the number when the operation is made

/// The wire form of an element: NCCL's number of the type, and how many of them.
struct WireType {
  int code;
  std::size_t parts;
};

/// The type in which NCCL computes; nullopt if it only moves bytes.
std::optional<WireType> computed(DType dtype);
/// The wire form of elements that are moved but not reduced.
WireType moved(DType dtype);
/// The number of an operation on a type that NCCL computes in, or kMadeForFactor. Throws
/// Error(Type), with a remedy, if there is none.
int numberOf(DType dtype, ReduceOp op);

}  // namespace fastcoll::nccl
