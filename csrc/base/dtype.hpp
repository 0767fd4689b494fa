// The element types and reduction operations that fastcoll knows, free of torch so that every layer
// below the process group can be compiled, tested and sanitized without it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastcoll {

enum class DType : std::uint8_t {
#define DTYPE(name, ...) name,
#include "dtypes.def"
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
  None,  // the collective moves data and reduces nothing
};

/// Bytes of one element.
std::size_t elementSize(DType dtype);
/// The type of a complex number's parts; any other type itself.
DType partOf(DType dtype);
bool isComplex(DType dtype);
/// A real floating-point type.
bool isFloating(DType dtype);
/// Whether tensors of this type can be reduced on the CPU.
bool isSummed(DType dtype);
/// ncclDataType_t of one element, or of a complex number's part; -1: NCCL has none.
int ncclNumber(DType dtype);
/// The name torch prints, without "torch.": "float32".
const char* dtypeName(DType dtype);
/// The name torch.distributed.ReduceOp uses: "SUM".
const char* reduceOpName(ReduceOp op);

}  // namespace fastcoll
