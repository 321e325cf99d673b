// Functions that exist once per instruction set: of kernels.cpp, the core's own rules; of
// programs.cpp, rules that come from Python.
#pragma once

#include "core/types.h"

namespace sparsestep {

struct ProgramKernels {
    Apply apply_float, apply_double;
};

KernelTable kernels_baseline();
ProgramKernels programs_baseline();
#if defined(__x86_64__)
KernelTable kernels_avx2();
KernelTable kernels_avx512();
ProgramKernels programs_avx2();
ProgramKernels programs_avx512();
#endif

}  // namespace sparsestep

// The name of one of them.
#define SPARSESTEP_JOIN_(a, b) a##b
#define SPARSESTEP_JOIN(a, b) SPARSESTEP_JOIN_(a, b)
