// The one function that each per-ISA unit exports; reduce.cpp chooses between them at run time.
#pragma once

#include "reduce.hpp"

namespace fastcoll {

/// The kernel, or nullptr where the pair is not defined. The AVX units exist on x86-64 alone, and
/// even their look-up is compiled for that ISA: ask the CPU before calling it.
ReduceFn reduceKernelBaseline(DType dtype, ReduceOp op) noexcept;
ReduceFn reduceKernelAvx2(DType dtype, ReduceOp op) noexcept;
ReduceFn reduceKernelAvx512(DType dtype, ReduceOp op) noexcept;

}  // namespace fastcoll
