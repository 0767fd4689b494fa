// The one table that each per-ISA unit exports; reduce.cpp chooses between them at run time.
#pragma once

#include "reduce.hpp"

namespace fastcoll {

/// The kernels, or what looks them up: nullptr where there is none. The AVX units exist on x86-64
/// alone, and even their look-ups are compiled for that ISA: ask the CPU before calling one.
struct IsaKernels {
  ReduceFn (*reduction)(DType dtype, ReduceOp op) noexcept;
  SquaresFn (*squares)(DType dtype) noexcept;
  WireCast bfloat16;
  WireCast float16;
};
extern const IsaKernels kernelsBaseline;
extern const IsaKernels kernelsAvx2;
extern const IsaKernels kernelsAvx512;

}  // namespace fastcoll
