#include "core/dispatch.h"

#include "kernels/kernels.h"

namespace sparsestep {

const std::vector<InstructionSet>& instruction_sets() {
    static const std::vector<InstructionSet> sets = [] {
        std::vector<InstructionSet> found{{"baseline", true, kernels_baseline()}};
#if defined(__x86_64__) && !defined(SPARSESTEP_BASELINE_ONLY)
        __builtin_cpu_init();
        found.push_back({"avx2", bool(__builtin_cpu_supports("avx2")), kernels_avx2()});
        const bool avx512 =
            __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
        found.push_back({"avx512", avx512, kernels_avx512()});
#endif
        return found;
    }();
    return sets;
}

}  // namespace sparsestep
