// The kernels for any CPU: 16-byte vectors, which are SSE2 on x86-64 and NEON on aarch64.
#include "reduce/optimize.inl"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define FASTCOLL_VECTOR_BYTES 16
#define FASTCOLL_KERNELS kernelsBaseline
#include "reduce/kernels.inl"
