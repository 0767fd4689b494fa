// How element types and reductions are called by NCCL: the numbers of its public header. A complex
// number goes as two floats, a bool as a byte of 0 or 1; what NCCL has no type for can be moved, as
// bytes, and not reduced.
#pragma once

#include <cstddef>
#include <optional>

#include "../base/dtype.hpp"

namespace fastcoll::nccl {

// ncclRedOp_t; those that are made for a factor have numbers beyond.
constexpr int kSum = 0;
constexpr int kAvg = 4;
constexpr int kMadeForFactor = -1;  // the number is known when it is made

/// What travels for an element: NCCL's number of the type, and how many of them.
struct WireType {
  int code;
  std::size_t parts;
};

/// The type by which NCCL computes; none where it only moves bytes.
std::optional<WireType> computed(DType dtype);
/// As what elements travel that nobody computes with.
WireType moved(DType dtype);
/// The number of an operation on a type that NCCL computes with, or kMadeForFactor. Throws Error of
/// kind Type if there is none, which says what to do.
int numberOf(DType dtype, ReduceOp op);

}  // namespace fastcoll::nccl
