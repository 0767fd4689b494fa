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
    switch (op) {
      case ReduceOp::Avg:
        return integerAverage<T>;
      case ReduceOp::Product:
        return kernel<IntegerKernel<Bits, Multiply>, sizeof(T)>;
      case ReduceOp::Min:
        return kernel<IntegerKernel<T, Lower>, sizeof(T)>;
      case ReduceOp::Max:
        return kernel<IntegerKernel<T, Higher>, sizeof(T)>;
      case ReduceOp::BitAnd:
        return kernel<IntegerKernel<std::uint64_t, And>, sizeof(T)>;
      case ReduceOp::BitOr:
        return kernel<IntegerKernel<std::uint64_t, Or>, sizeof(T)>;
      case ReduceOp::BitXor:
        return kernel<IntegerKernel<std::uint64_t, Xor>, sizeof(T)>;
      default:
        break;
    }
  }
  return nullptr;
}

ReduceFn boolKernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Max:
    case ReduceOp::BitOr:
      return kernel<BoolKernel<Or>, 1>;
    case ReduceOp::Product:
    case ReduceOp::Min:
    case ReduceOp::BitAnd:
      return kernel<BoolKernel<And>, 1>;
    case ReduceOp::BitXor:
      return kernel<BoolKernel<Xor>, 1>;
    default:
      return nullptr;
  }
}

ReduceFn reductionOf(DType dtype, ReduceOp op) noexcept {
  switch (dtype) {
    case DType::UInt8:
      return integerKernel<std::uint8_t>(op);
    case DType::Int8:
      return integerKernel<std::int8_t>(op);
    case DType::UInt16:
      return integerKernel<std::uint16_t>(op);
    case DType::Int16:
      return integerKernel<std::int16_t>(op);
    case DType::UInt32:
      return integerKernel<std::uint32_t>(op);
    case DType::Int32:
      return integerKernel<std::int32_t>(op);
    case DType::UInt64:
      return integerKernel<std::uint64_t>(op);
    case DType::Int64:
      return integerKernel<std::int64_t>(op);
    case DType::Bool:
      if constexpr (!kSumsOnly) return boolKernel(op);
      return nullptr;
    case DType::Float16:
      return floatKernel<Float16, false>(op);
    case DType::BFloat16:
      return floatKernel<BFloat16, false>(op);
    case DType::Float32:
      return floatKernel<Native<float>, false>(op);
    case DType::Float64:
      return floatKernel<Native<double>, false>(op);
    case DType::Complex64:
      return floatKernel<Native<float>, true>(op);
    case DType::Complex128:
      return floatKernel<Native<double>, true>(op);
    default:
      return nullptr;
  }
}

SquaresFn squaresOf(DType dtype) noexcept {
  switch (dtype) {
    case DType::Float16:
      return squaresOfHalves<Float16>;
    case DType::BFloat16:
      return squaresOfHalves<BFloat16>;
    case DType::Float32:
      return squaresOf<float>;
    case DType::Float64:
      return squaresOf<double>;
    default:
      return nullptr;
  }
}

}  // namespace

const IsaKernels FASTCOLL_KERNELS = {reductionOf,
                                     squaresOf,
                                     {narrowAll<BFloat16>, widenAll<BFloat16>},
                                     {narrowAll<Float16>, widenAll<Float16>}};

}  // namespace fastcoll
