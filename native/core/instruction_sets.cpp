#include "core/instruction_sets.h"

#include "core/cpu.h"
#include "kernels/kernels.h"

namespace sparsestep {

// CMake defines which sets are compiled.
const std::vector<InstructionSet>& instruction_sets() {
    static const std::vector<InstructionSet> sets = {
#if defined(SPARSESTEP_HAS_BASELINE)
        {"baseline", true, kernels_float_baseline(), kernels_double_baseline(),
         programs_float_baseline(), programs_double_baseline(), lookup_baseline()},
#endif
#if defined(SPARSESTEP_HAS_AVX2)
        {"avx2", has_avx2(), kernels_float_avx2(), kernels_double_avx2(), programs_float_avx2(),
         programs_double_avx2(), lookup_avx2()},
#endif
#if defined(SPARSESTEP_HAS_AVX512)
        {"avx512", has_avx512(), kernels_float_avx512(), kernels_double_avx2(),
         programs_float_avx512(), programs_double_avx2(), lookup_avx512()},
#endif
    };
    return sets;
}

}  // namespace sparsestep
