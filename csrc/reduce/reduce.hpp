// Reductions on the CPU: k sources, one destination, by a fixed binary tree over the sources.
//
//   dst[i] = post(fold(0, k))
//   fold(a, 1) = pre(src_a[i])
//   fold(a, n) = op(fold(a, m), fold(a + m, n - m)), m the largest power of two below n
//
// So op is applied as ((0 1) (2 3)) ((4 5) 6) to seven sources. Two and three are folded from left
// to right. The error of a sum grows with log2(k) (Higham, Accuracy and Stability of Numerical
// Algorithms, 2nd ed., 4.2: pairwise summation). A run of 2^m sources that begins at a multiple of
// 2^m is one operand. A rank that has all of them can fold them alone, with the same bits.
//
// float16 and bfloat16 are accumulated in float32 and rounded once; every other type in itself. The
// bits of dst[i] depend on src_j[i] and k alone: not on count, alignment, chunking or the ISA.
//
// With one source and no scaling, the result is a copy. Otherwise any NaN is written as the
// positive quiet NaN without payload. Min and Max: a NaN wins, as in torch.minimum. -0 is below +0,
// so the result does not depend on the order of the sources. Integers wrap around; their Avg is the
// sum, which wraps around, divided and cut towards zero. For bool, Sum and Max are or, Product and
// Min are and; any nonzero byte is true, and 0 or 1 is written. Factor and divisor scale both parts
// of a complex number.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"

namespace fastcoll {

/// Reduces `count` elements of `k >= 1` sources into `dst`, and into `copy` unless it is nullptr.
/// To write both results at once costs less than to copy the first. `dst` and `copy` may each be
/// equal to any one source, and must not overlap the sources otherwise. They must not overlap each
/// other. No pointer needs an alignment. PreMulSum multiplies each source by `factor`. Avg divides
/// by `divisor`. Other operations ignore both.
struct ReduceArgs {
  void* dst;
  const void* const* srcs;
  int k;
  std::size_t count;
  double factor = 1.0;
  double divisor = 1.0;
  void* copy = nullptr;
};

using ReduceFn = void (*)(const ReduceArgs&);

/// The kernel for this machine. If there is none, throws Error(Value) with the reason
/// (bitwise on floats, AVG of bool, PREMUL_SUM of integers, MIN and MAX of complex, fp8).
ReduceFn reduceFunction(DType dtype, ReduceOp op);

/// Sums the squares of `count` elements in float64. The sum is not finite if an element is not. The
/// order is not fixed, so the last bits depend on the machine.
using SquaresFn = double (*)(const void* from, std::size_t count) noexcept;

/// For complex types, the function takes the numbers' parts. Throws Error(Type) if the type is not
/// floating-point.
SquaresFn squaresFunction(DType dtype);

/// Converts between float32 in memory and a 16-bit float on the wire. It rounds to nearest even and
/// widens exactly. `to` and `from` do not overlap.
struct WireCast {
  void (*narrow)(void* to, const void* from, std::size_t count) noexcept;
  void (*widen)(void* to, const void* from, std::size_t count) noexcept;
};

/// The casts between float32 and Float16 or BFloat16. Throws Error(Type) for another type.
const WireCast& wireCast(DType wire);

/// Sums words of 32 bits, each times its key (digest.hpp).
using DigestFn = std::uint64_t (*)(const void* from, const std::uint32_t* keys,
                                   std::size_t words) noexcept;
DigestFn digestFunction() noexcept;

/// Name of the instruction set in use: "avx512", "avx2", "baseline".
const char* reduceIsa();

/// For tests: uses this instruction set from now on. Throws Error(Value) if the machine or build
/// lacks it.
void setReduceIsa(const char* name);

}  // namespace fastcoll
