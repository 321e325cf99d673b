// What this machine can run beyond the baseline.
#pragma once

namespace sparsestep {

#if defined(__x86_64__)
bool has_avx2();
bool has_avx512();  // with the parts that the kernels are compiled for
#endif

}  // namespace sparsestep
