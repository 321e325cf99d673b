// Compiler-specific attributes and pragmas, for GCC and Clang.
#pragma once

// Always inlined: GCC considers a function that only prefetches to have no effect and drops the
// calls.
#define SPARSESTEP_INLINE inline __attribute__((always_inline))
#define SPARSESTEP_LAMBDA __attribute__((always_inline))

// Before a loop whose iterations are independent. Clang has no such pragma: its
// `loop vectorize(assume_safety)` also permits reordered sums.
#if defined(__clang__)
#define SPARSESTEP_IVDEP
#else
#define SPARSESTEP_IVDEP _Pragma("GCC ivdep")
#endif
