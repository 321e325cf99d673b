#include "core/dispatch.h"

#include "core/instruction_sets.h"
#include "kernels/kernels.h"

namespace sparsestep {

const std::vector<InstructionSet>& instruction_sets() {
    static const std::vector<InstructionSet> sets = {
        {"baseline", true, kernels_baseline()},
#if defined(__x86_64__) && !defined(SPARSESTEP_BASELINE_ONLY)
        {"avx2", has_avx2(), kernels_avx2()},
        {"avx512", has_avx512(), kernels_avx512()},
#endif
    };
    return sets;
}

}  // namespace sparsestep
