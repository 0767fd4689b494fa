// The element types and reduction operations of fastcoll. Torch is not used here, so every layer
// below the process group can be compiled, tested and sanitized without it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastcoll {

enum class DType : std::uint8_t {
#define DTYPE(name, ...) name,
#include "base/dtypes.def"
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

/// A dtype's row of dtypes.def.
struct DTypeInfo {
  const char* name;  // as torch prints it, without "torch.": "float32"
  std::size_t bytes;
  DType part;
  enum { Integer, Floating, Complex, Bytes } kind;
  bool summed;
  int nccl;
};

// Dtype numbers from other ranks reach this before they are checked, so they may be invalid.
inline const DTypeInfo& infoOf(DType dtype) {
  static constexpr DTypeInfo kRows[] = {
#define DTYPE(name, torch, text, bytes, part, kind, summed, nccl) \
  {text, bytes, DType::part, DTypeInfo::kind, summed, nccl},
#include "base/dtypes.def"
      {"unknown", 1, DType::Opaque, DTypeInfo::Bytes, false, -1},
  };
  constexpr std::size_t kUnknown = sizeof kRows / sizeof *kRows - 1;
  const auto number = static_cast<std::size_t>(dtype);
  return kRows[number < kUnknown ? number : kUnknown];
}

/// Bytes of one element.
inline std::size_t elementSize(DType dtype) {
  return infoOf(dtype).bytes;
}
/// For a complex type, the type of its parts; else the type itself.
inline DType partOf(DType dtype) {
  return infoOf(dtype).part;
}
inline bool isComplex(DType dtype) {
  return infoOf(dtype).kind == DTypeInfo::Complex;
}
/// Whether the type is a real floating-point type.
inline bool isFloating(DType dtype) {
  return infoOf(dtype).kind == DTypeInfo::Floating;
}
/// ncclDataType_t of one element, or of a complex number's part; -1 if NCCL has none.
inline int ncclNumber(DType dtype) {
  return infoOf(dtype).nccl;
}
inline const char* dtypeName(DType dtype) {
  return infoOf(dtype).name;
}

/// The name torch.distributed.ReduceOp uses: "SUM".
inline const char* reduceOpName(ReduceOp op) {
  constexpr const char* kNames[] = {"SUM",  "AVG", "PRODUCT", "MIN",        "MAX",
                                    "BAND", "BOR", "BXOR",    "PREMUL_SUM", "-"};
  const auto number = static_cast<std::size_t>(op);
  return number <= static_cast<std::size_t>(ReduceOp::None) ? kNames[number] : "unknown";
}

}  // namespace fastcoll
