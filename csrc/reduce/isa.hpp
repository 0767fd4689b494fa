// The one table that each per-ISA unit exports; reduce.cpp selects a table at run time.
#pragma once

#include "reduce/reduce.hpp"

namespace fastcoll {

/// The kernels, or functions that look them up and return nullptr if there is none. The AVX units
/// exist on x86-64 only. Even their look-ups are compiled for that ISA, so check the CPU before a
/// call.
struct IsaKernels {
  ReduceFn (*reduction)(DType dtype, ReduceOp op) noexcept;
  SquaresFn (*squares)(DType dtype) noexcept;
  WireCast bfloat16;
  WireCast float16;
  DigestFn digest;
};
extern const IsaKernels kernelsBaseline;
extern const IsaKernels kernelsAvx2;
extern const IsaKernels kernelsAvx512;

}  // namespace fastcoll
