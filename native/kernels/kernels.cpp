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

#define SPARSESTEP_CATCH_UP(IdleUpdate) {IdleUpdate<T>::name, &catch_up<IdleUpdate, T>},
constexpr IdleKernel idle_updates[] = {SPARSESTEP_IDLE_UPDATES(SPARSESTEP_CATCH_UP)};

}  // namespace

Kernels SPARSESTEP_TYPED(kernels_)() {
    return {rules, int(sizeof(rules) / sizeof(rules[0])), idle_updates,
            int(sizeof(idle_updates) / sizeof(idle_updates[0])), &norms<T>};
}

}  // namespace sparsestep
