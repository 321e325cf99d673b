// Every rule's loop, compiled once per instruction set: CMake sets SPARSESTEP_ISA and the flags.
// The registry of rules is rules/all.h.
#include "kernels/kernels.h"

#include "kernels/apply.h"
#include "kernels/grads.h"
#include "kernels/idle.h"
#include "rules/registry.h"

namespace sparsestep {
namespace {

template <template <class> class Rule>
constexpr RuleKernels kernels_of() {
    using Plain = Rule<float>;
    return {Plain::name,    Plain::states,       Plain::slot_states,
            Plain::options, &apply<Rule, float>, &apply<Rule, double>};
}

#define SPARSESTEP_KERNELS(Rule) kernels_of<Rule>(),
constexpr RuleKernels rules[] = {SPARSESTEP_RULES(SPARSESTEP_KERNELS)};

#define SPARSESTEP_CATCH_UP(Motion) \
    {Motion<float>::name, &catch_up<Motion, float>, &catch_up<Motion, double>},
constexpr MotionKernels motions[] = {SPARSESTEP_MOTIONS(SPARSESTEP_CATCH_UP)};

}  // namespace

KernelTable SPARSESTEP_JOIN(kernels_, SPARSESTEP_ISA)() {
    const ProgramKernels programs = SPARSESTEP_JOIN(programs_, SPARSESTEP_ISA)();
    return {rules,
            int(sizeof(rules) / sizeof(rules[0])),
            motions,
            int(sizeof(motions) / sizeof(motions[0])),
            &norms<float>,
            &norms<double>,
            programs.apply_float,
            programs.apply_double};
}

}  // namespace sparsestep
