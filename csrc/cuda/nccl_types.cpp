#include "cuda/nccl_types.hpp"

#include <array>
#include <string>

#include "base/error.hpp"

namespace fastcoll::nccl {
namespace {

constexpr int kProduct = 1;
constexpr int kMax = 2;
constexpr int kMin = 3;

struct KnownOp {
  ReduceOp op;
  int number;
};
constexpr std::array<KnownOp, 6> kOps{{{ReduceOp::Sum, kSum},
                                       {ReduceOp::Product, kProduct},
                                       {ReduceOp::Max, kMax},
                                       {ReduceOp::Min, kMin},
                                       {ReduceOp::Avg, kAvg},
                                       {ReduceOp::PreMulSum, kMadeForFactor}}};
constexpr std::array<KnownOp, 3> kOfComplex{
    {{ReduceOp::Sum, kSum}, {ReduceOp::Avg, kAvg}, {ReduceOp::PreMulSum, kMadeForFactor}}};
// "Or" and "and" of bytes that are 0 or 1, as in torch.
constexpr std::array<KnownOp, 6> kOfBools{{{ReduceOp::Sum, kMax},
                                           {ReduceOp::Product, kMin},
                                           {ReduceOp::Max, kMax},
                                           {ReduceOp::Min, kMin},
                                           {ReduceOp::BitOr, kMax},
                                           {ReduceOp::BitAnd, kMin}}};

template <typename Table>
int lookedUp(const Table& table, DType dtype, ReduceOp op) {
  std::string names;
  for (const KnownOp& known : table) {
    if (known.op == op) return known.number;
    names += concat(names.empty() ? "" : ", ", reduceOpName(known.op));
  }
  throw Error(ErrorKind::Type,
              concat("expected an operation that NCCL has for torch.", dtypeName(dtype), " (",
                     names, "), got ", reduceOpName(op),
                     ". Use one of these, or gather the tensors and reduce them with torch."));
}

}  // namespace

std::optional<WireType> computed(DType dtype) {
  const int number = ncclNumber(dtype);
  if (number < 0) return std::nullopt;
  return WireType{number, isComplex(dtype) ? 2u : 1u};
}

WireType moved(DType dtype) {
  return computed(dtype).value_or(WireType{1, elementSize(dtype)});
}

int numberOf(DType dtype, ReduceOp op) {
  if (dtype == DType::Bool) return lookedUp(kOfBools, dtype, op);
  if (isComplex(dtype)) return lookedUp(kOfComplex, dtype, op);
  if (op == ReduceOp::PreMulSum && !isFloating(dtype)) {
    throw Error(ErrorKind::Type,
                concat("expected a floating-point or complex dtype for PREMUL_SUM, got torch.",
                       dtypeName(dtype), ". Use SUM."));
  }
  return lookedUp(kOps, dtype, op);
}

}  // namespace fastcoll::nccl
