// How GCC compiles the kernels; each kernels_*.cpp includes this first. A sum rounds after each
// operation, so no multiplication is fused into an addition.
#if defined(__GNUC__) && !defined(__clang__)
#if defined(__SANITIZE_ADDRESS__)
#pragma GCC optimize("fp-contract=off", "no-exceptions")  // with O3 it takes minutes
#else
#pragma GCC optimize("O3", "fp-contract=off", "no-exceptions")
#endif
#endif
