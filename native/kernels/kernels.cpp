// Every rule's loop, compiled once per instruction set: CMake sets SPARSESTEP_ISA and the flags.
// The registry of rules is the array below.
#include "kernels/kernels.h"

#include "bench/limit.h"
#include "kernels/apply.h"
#include "kernels/catch_up.h"
#include "kernels/norms.h"
#include "rules/adagrad.h"
#include "rules/adam.h"
#include "rules/ftrl.h"
#include "rules/lion.h"
#include "rules/rmsprop.h"
#include "rules/rowwise_adagrad.h"
#include "rules/rowwise_adam.h"
#include "rules/sgd.h"
#include "rules/sparse_adam.h"

namespace sparsestep {
namespace {

template <template <class> class Rule, int64_t... limit_dims>
constexpr RuleKernels kernels_of() {
    using Plain = Rule<float>;
    return {Plain::name,
            Plain::states,
            Plain::slot_states,
            Plain::options,
            &apply<Rule, float>,
            &apply<Rule, double>,
            &limit<Rule, 64, limit_dims...>};
}

constexpr RuleKernels rules[] = {
    kernels_of<SparseAdam, 16, 32, 128>(),
    kernels_of<SparseAdamPerRow>(),
    kernels_of<Adam>(),
    kernels_of<AdamPerRow>(),
    kernels_of<AMSGrad>(),
    kernels_of<AMSGradPerRow>(),
    kernels_of<Adagrad>(),
    kernels_of<RowwiseAdagrad>(),
    kernels_of<RowwiseAdam>(),
    kernels_of<RowwiseAdamPerRow>(),
    kernels_of<SGD>(),
    kernels_of<MomentumSGD>(),
    kernels_of<RMSprop>(),
    kernels_of<MomentumRMSprop>(),
    kernels_of<CenteredRMSprop>(),
    kernels_of<CenteredMomentumRMSprop>(),
    kernels_of<Lion>(),
    kernels_of<Ftrl>(),
};

}  // namespace

#define SPARSESTEP_JOIN_(a, b) a##b
#define SPARSESTEP_JOIN(a, b) SPARSESTEP_JOIN_(a, b)

KernelTable SPARSESTEP_JOIN(kernels_, SPARSESTEP_ISA)() {
    return {rules,
            int(sizeof(rules) / sizeof(rules[0])),
            &catch_up<float>,
            &catch_up<double>,
            &norms<float>,
            &norms<double>};
}

}  // namespace sparsestep
