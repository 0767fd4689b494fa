// The element types and reduction operations of fastcoll. Torch is not used here, so every layer
// below the process group can be compiled, tested and sanitized without it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/exported.hpp"

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
FASTCOLL_EXPORTED std::size_t elementSize(DType dtype);
/// For a complex type, the type of its parts; else the type itself.
FASTCOLL_EXPORTED DType partOf(DType dtype);
FASTCOLL_EXPORTED bool isComplex(DType dtype);
/// Whether the type is a real floating-point type.
FASTCOLL_EXPORTED bool isFloating(DType dtype);
/// Whether tensors of this type can be reduced on the CPU.
bool isSummed(DType dtype);
/// ncclDataType_t of one element, or of a complex number's part; -1 if NCCL has none.
FASTCOLL_EXPORTED int ncclNumber(DType dtype);
/// The name torch prints, without "torch.": "float32".
FASTCOLL_EXPORTED const char* dtypeName(DType dtype);
/// The name torch.distributed.ReduceOp uses: "SUM".
FASTCOLL_EXPORTED const char* reduceOpName(ReduceOp op);

}  // namespace fastcoll
