// The loops of every rule and of every idle update; see kernels.h. The registry of rules is
// rules/registry.h.
#include "kernels/kernels.h"

#include "kernels/apply.h"
#include "kernels/grads.h"
#include "kernels/idle.h"
#include "rules/registry.h"

namespace sparsestep {
namespace {

using T = SPARSESTEP_TYPE;

#define SPARSESTEP_KERNEL(Rule) \
    {Rule<T>::name, Rule<T>::states, Rule<T>::slot_states, Rule<T>::options, &apply<Rule, T>},
constexpr RuleKernel rules[] = {SPARSESTEP_RULES(SPARSESTEP_KERNEL)};

#define SPARSESTEP_CATCH_UP(Motion) {Motion<T>::name, &catch_up<Motion, T>},
constexpr MotionKernel motions[] = {SPARSESTEP_MOTIONS(SPARSESTEP_CATCH_UP)};

}  // namespace

Kernels SPARSESTEP_TYPED(kernels_)() {
    return {rules, int(sizeof(rules) / sizeof(rules[0])), motions,
            int(sizeof(motions) / sizeof(motions[0])), &norms<T>};
}

}  // namespace sparsestep
