// The element types and reduction operations of fastcoll. Torch is not used here, so every layer
// below the process group can be compiled, tested and sanitized without it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastcoll {

enum class DType : std::uint8_t {
#define DTYPE(name, ...) name,
#include "base/dtypes.def"
#undef DTYPE
};

enum class ReduceOp : std::uint8_t {
  Sum,
  Avg,
  Product,
  Min,
  Max,
  BitAnd,
  BitOr,
  BitXor,
  PreMulSum,
  None,  // the collective only moves data
};

/// Bytes of one element.
std::size_t elementSize(DType dtype);
/// For a complex type, the type of its parts; else the type itself.
DType partOf(DType dtype);
bool isComplex(DType dtype);
/// Whether the type is a real floating-point type.
bool isFloating(DType dtype);
/// Whether tensors of this type can be reduced on the CPU.
bool isSummed(DType dtype);
/// ncclDataType_t of one element, or of a complex number's part; -1 if NCCL has none.
int ncclNumber(DType dtype);
/// The name torch prints, without "torch.": "float32".
const char* dtypeName(DType dtype);
/// The name torch.distributed.ReduceOp uses: "SUM".
const char* reduceOpName(ReduceOp op);

}  // namespace fastcoll
