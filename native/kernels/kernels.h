// Functions that are compiled for each instruction set; kernels.cpp and programs.cpp also for each
// of float and double. CMake sets SPARSESTEP_ISA, SPARSESTEP_TYPE and the flags.
#pragma once

#include "core/lookup.h"
#include "core/types.h"

namespace sparsestep {

// With AVX-512, double uses the AVX2 kernels.
Kernels kernels_float_baseline();
Kernels kernels_float_avx2();
Kernels kernels_float_avx512();
Kernels kernels_double_baseline();
Kernels kernels_double_avx2();
Apply programs_float_baseline();
Apply programs_float_avx2();
Apply programs_float_avx512();
Apply programs_double_baseline();
Apply programs_double_avx2();
Lookup lookup_baseline();
Lookup lookup_avx2();
Lookup lookup_avx512();

}  // namespace sparsestep

// The name of such a function.
#define SPARSESTEP_JOIN_(a, b) a##b
#define SPARSESTEP_JOIN(a, b) SPARSESTEP_JOIN_(a, b)
#define SPARSESTEP_TYPED(name) \
    SPARSESTEP_JOIN(name, SPARSESTEP_JOIN(SPARSESTEP_TYPE, SPARSESTEP_JOIN(_, SPARSESTEP_ISA)))
