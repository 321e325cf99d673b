// One function per instruction set that kernels.cpp is compiled for.
#pragma once

#include "core/types.h"

namespace sparsestep {

KernelTable kernels_baseline();
#if defined(__x86_64__)
KernelTable kernels_avx2();
KernelTable kernels_avx512();
#endif

}  // namespace sparsestep
