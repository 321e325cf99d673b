// What this machine can run beyond the baseline.
#pragma once

namespace sparsestep {

bool has_avx2();
bool has_avx512();  // with the parts that the kernels are compiled for

}  // namespace sparsestep
