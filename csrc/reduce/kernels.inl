// All kernels of one ISA; included by one unit per ISA, which sets the vector width.
//
// Everything here and in the included files has internal linkage and calls no function of the
// standard library. Otherwise a weak symbol of this unit could contain AVX-512 code, and the linker
// could use it for the whole program. For the same reason each unit sets its own target and its own
// floating-point contraction instead of relying on build flags.
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "reduce/isa.hpp"

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "csrc/reduce must be built without -ffast-math: NaN, Inf, -0 and the order of sums are kept"
#endif

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

#define FASTCOLL_INLINE inline __attribute__((always_inline))
#define FASTCOLL_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define FASTCOLL_UNROLL(times) FASTCOLL_PRAGMA(clang loop unroll_count(times))
#else
#define FASTCOLL_UNROLL(times) FASTCOLL_PRAGMA(GCC unroll times)
#endif

namespace fastcoll {
namespace {

// Kernels take long to compile. So AVX-512 has the sums only, and reduce.cpp takes the others from
// AVX2's table.
constexpr bool kSumsOnly = FASTCOLL_VECTOR_BYTES == 64;

// clang-format off: each file uses the files before it
#include "reduce/lanes.inl"
#include "reduce/float_formats.inl"
#include "reduce/float_kernels.inl"
#include "reduce/integer_kernels.inl"
#include "reduce/loops.inl"
#include "reduce/wire_kernels.inl"
#include "reduce/digest_kernel.inl"
// clang-format on

template <class Format, bool kComplex>
ReduceFn floatKernel(ReduceOp op) {
  using Lane = typename Format::Lane;
  constexpr std::size_t kElement = Format::kElement * (kComplex ? 2 : 1);
  if (op == ReduceOp::Sum) return kernel<FloatKernel<Format, Sum<Lane>>, kElement>;
  if (op == ReduceOp::Avg) return averageKernel<Format, kElement>;
  if constexpr (!kSumsOnly) {
    if (op == ReduceOp::PreMulSum) return kernel<FloatKernel<Format, PreMulSum<Lane>>, kElement>;
    if constexpr (kComplex) {
      if (op == ReduceOp::Product)
        return kernel<FloatKernel<Format, ComplexProduct<Lane>>, kElement>;
    } else {
      if (op == ReduceOp::Product) return kernel<FloatKernel<Format, Product<Lane>>, kElement>;
      if (op == ReduceOp::Min) return kernel<FloatKernel<Format, Min<Lane>>, kElement>;
      if (op == ReduceOp::Max) return kernel<FloatKernel<Format, Max<Lane>>, kElement>;
    }
  }
  return nullptr;
}

template <class T>
ReduceFn integerKernel(ReduceOp op) {
  using Bits = typename Lanes<T>::Bits;  // sums and products wrap around; signed T shares them
  if (op == ReduceOp::Sum) return kernel<IntegerKernel<Bits, Add>, sizeof(T)>;
  if constexpr (!kSumsOnly) {
    if (op == ReduceOp::Avg) return integerAverage<T>;
    if (op == ReduceOp::Product) return kernel<IntegerKernel<Bits, Multiply>, sizeof(T)>;
    if (op == ReduceOp::Min) return kernel<IntegerKernel<T, Lower>, sizeof(T)>;
    if (op == ReduceOp::Max) return kernel<IntegerKernel<T, Higher>, sizeof(T)>;
    if (op == ReduceOp::BitAnd) return kernel<IntegerKernel<std::uint64_t, And>, sizeof(T)>;
    if (op == ReduceOp::BitOr) return kernel<IntegerKernel<std::uint64_t, Or>, sizeof(T)>;
    if (op == ReduceOp::BitXor) return kernel<IntegerKernel<std::uint64_t, Xor>, sizeof(T)>;
  }
  return nullptr;
}

ReduceFn boolKernel(ReduceOp op) {
  if (kSumsOnly) return nullptr;
  const bool isOr = op == ReduceOp::Sum || op == ReduceOp::Max || op == ReduceOp::BitOr;
  const bool isAnd = op == ReduceOp::Product || op == ReduceOp::Min || op == ReduceOp::BitAnd;
  if (isOr) return kernel<BoolKernel<Or>, 1>;
  if (isAnd) return kernel<BoolKernel<And>, 1>;
  return op == ReduceOp::BitXor ? kernel<BoolKernel<Xor>, 1> : nullptr;
}

constexpr struct {
  DType dtype;
  ReduceFn (*reduction)(ReduceOp op);
  SquaresFn squares;
} kRows[] = {
    {DType::UInt8, integerKernel<std::uint8_t>, nullptr},
    {DType::Int8, integerKernel<std::int8_t>, nullptr},
    {DType::UInt16, integerKernel<std::uint16_t>, nullptr},
    {DType::Int16, integerKernel<std::int16_t>, nullptr},
    {DType::UInt32, integerKernel<std::uint32_t>, nullptr},
    {DType::Int32, integerKernel<std::int32_t>, nullptr},
    {DType::UInt64, integerKernel<std::uint64_t>, nullptr},
    {DType::Int64, integerKernel<std::int64_t>, nullptr},
    {DType::Bool, boolKernel, nullptr},
    {DType::Float16, floatKernel<Float16, false>, squaresOfHalves<Float16>},
    {DType::BFloat16, floatKernel<BFloat16, false>, squaresOfHalves<BFloat16>},
    {DType::Float32, floatKernel<Native<float>, false>, squaresOf<float>},
    {DType::Float64, floatKernel<Native<double>, false>, squaresOf<double>},
    {DType::Complex64, floatKernel<Native<float>, true>, nullptr},
    {DType::Complex128, floatKernel<Native<double>, true>, nullptr},
};

ReduceFn reductionOf(DType dtype, ReduceOp op) noexcept {
  for (const auto& row : kRows) {
    if (row.dtype == dtype) return row.reduction(op);
  }
  return nullptr;
}

SquaresFn squaresFor(DType dtype) noexcept {
  for (const auto& row : kRows) {
    if (row.dtype == dtype) return row.squares;
  }
  return nullptr;
}

}  // namespace

const IsaKernels FASTCOLL_KERNELS = {reductionOf,
                                     squaresFor,
                                     {narrowAll<BFloat16>, widenAll<BFloat16>},
                                     {narrowAll<Float16>, widenAll<Float16>},
                                     digestWords};

}  // namespace fastcoll
