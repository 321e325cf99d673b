// Adam's formula as torch.optim.SparseAdam has it: eps is added before bias correction.
// The Python twin is src/sparsestep/optim/sparse_adam.py.
#pragma once

#include "rules/bias_correction.h"

namespace sparsestep {
namespace {

template <class T, bool per_row>
struct SparseAdamRule {
    static constexpr const char* name = per_row ? "sparse_adam_per_row" : "sparse_adam";
    static constexpr int states = 2;
    static constexpr int slot_states = BiasCorrection<T, per_row>::slot_states;
    static constexpr bool wants_mean_square = false;
    static constexpr bool has_fixed_sizes = !per_row;
    static constexpr int options = 4;  // lr, betas, eps

    T one_minus_beta1, one_minus_beta2, eps;
    BiasCorrection<T, per_row> bias;
    T step_size;

    SparseAdamRule(const double* o, double step)
        : one_minus_beta1(T(1 - o[1])),
          one_minus_beta2(T(1 - o[2])),
          eps(T(o[3])),
          bias(o, step),
          step_size(T(o[0] / (1 - power(o[1], step)) * square_root(1 - power(o[2], step)))) {}

    void enter_slot(T* row_state, T) {
        bias.count(row_state[0]);
        step_size = bias.step_size * bias.root;
    }
    inline void operator()(T& param, T grad, T& exp_avg, T& exp_avg_sq) const {
        exp_avg = exp_avg + one_minus_beta1 * (grad - exp_avg);
        exp_avg_sq = exp_avg_sq + one_minus_beta2 * (grad * grad - exp_avg_sq);
        param = param - step_size * (exp_avg / (square_root(exp_avg_sq) + eps));
    }
};

template <class T>
using SparseAdam = SparseAdamRule<T, false>;
template <class T>
using SparseAdamPerRow = SparseAdamRule<T, true>;

}  // namespace
}  // namespace sparsestep
