// The kernels for x86-64 with AVX2 and F16C: 32-byte vectors.
#if defined(__x86_64__)

#if defined(__clang__)
#include <immintrin.h>  // before the push: these functions carry their own targets
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#include "reduce/optimize.inl"
#pragma GCC target("avx2,f16c")
#include <immintrin.h>
#endif

#define FASTCOLL_VECTOR_BYTES 32
#define FASTCOLL_KERNELS kernelsAvx2
#include "reduce/kernels.inl"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
