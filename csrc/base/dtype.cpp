#include "base/dtype.hpp"

#include <iterator>

namespace fastcoll {
namespace {

enum class Kind { Integer, Floating, Complex, Bytes };

struct Row {
  const char* name;
  std::size_t bytes;
  DType part;
  Kind kind;
  bool summed;
  int nccl;
};

constexpr Row kRows[] = {
#define DTYPE(name, torch, text, bytes, part, kind, summed, nccl) \
  {text, bytes, DType::part, Kind::kind, summed, nccl},
#include "base/dtypes.def"
#undef DTYPE
};

// Dtype numbers from other ranks reach this before they are checked, so they may be invalid.
const Row& rowOf(DType dtype) {
  static constexpr Row kUnknown{"unknown", 1, DType::Opaque, Kind::Bytes, false, -1};
  const auto number = static_cast<std::size_t>(dtype);
  return number < std::size(kRows) ? kRows[number] : kUnknown;
}

constexpr const char* kOps[] = {"SUM",  "AVG", "PRODUCT", "MIN",        "MAX",
                                "BAND", "BOR", "BXOR",    "PREMUL_SUM", "-"};
static_assert(std::size(kOps) == static_cast<std::size_t>(ReduceOp::None) + 1);

}  // namespace

std::size_t elementSize(DType dtype) {
  return rowOf(dtype).bytes;
}

DType partOf(DType dtype) {
  return rowOf(dtype).part;
}

bool isComplex(DType dtype) {
  return rowOf(dtype).kind == Kind::Complex;
}

bool isFloating(DType dtype) {
  return rowOf(dtype).kind == Kind::Floating;
}

bool isSummed(DType dtype) {
  return rowOf(dtype).summed;
}

int ncclNumber(DType dtype) {
  return rowOf(dtype).nccl;
}

const char* dtypeName(DType dtype) {
  return rowOf(dtype).name;
}

const char* reduceOpName(ReduceOp op) {
  const auto number = static_cast<std::size_t>(op);
  return number < std::size(kOps) ? kOps[number] : "unknown";
}

}  // namespace fastcoll
