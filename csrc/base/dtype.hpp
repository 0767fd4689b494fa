// The element types and reduction operations that fastcoll knows, free of torch so that every layer
// below the process group can be compiled, tested and sanitized without it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastcoll {

enum class DType : std::uint8_t {
  UInt8,
  Int8,
  UInt16,
  Int16,
  UInt32,
  Int32,
  UInt64,
  Int64,
  Bool,
  Float16,
  BFloat16,
  Float32,
  Float64,
  Complex64,   // two float32
  Complex128,  // two float64
  // Types that travel but are never summed.
  Complex32,
  Float8E5M2,
  Float8E4M3FN,
  Float8E5M2FNUZ,
  Float8E4M3FNUZ,
  Float8E8M0FNU,
  Opaque,  // any other type whose elements are plain bytes; counted in bytes
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
/// The name torch prints, without "torch.": "float32".
const char* dtypeName(DType dtype);
/// The name torch.distributed.ReduceOp uses: "SUM".
const char* reduceOpName(ReduceOp op);

}  // namespace fastcoll
