// Adam with one second moment per row, fed by the mean of the row's squared gradient; the first
// moment is kept per element, and not at all if beta1 is zero. The Python twin is
// src/sparsestep/optim/rowwise_adam.py.
#pragma once

#include "rules/bias_correction.h"

namespace sparsestep {
namespace {

template <class T, bool momentum, bool per_row>
struct RowwiseAdamRule {
    static constexpr const char* name =
        momentum
            ? (per_row ? "rowwise_adam_per_row" : "rowwise_adam")
            : (per_row ? "rowwise_adam_without_momentum_per_row" : "rowwise_adam_without_momentum");
    static constexpr int states = momentum ? 1 : 0;
    static constexpr int slot_states = 1 + BiasCorrection<T, per_row>::slot_states;
    static constexpr bool wants_mean_square = true;
    static constexpr bool has_fixed_sizes = !per_row;
    static constexpr int options = 4;  // lr, betas, eps

    T one_minus_beta1, beta2, one_minus_beta2, eps;
    BiasCorrection<T, per_row> bias;
    T step_size = 0;

    RowwiseAdamRule(const double* o, double step)
        : one_minus_beta1(T(1 - o[1])),
          beta2(T(o[2])),
          one_minus_beta2(T(1 - o[2])),
          eps(T(o[3])),
          bias(o, step) {}

    void enter_slot(T* row_state, T mean_square) {
        if constexpr (per_row) bias.count(row_state[1]);
        T& exp_avg_sq = row_state[0];
        exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * mean_square;
        step_size = bias.step_size / (square_root(exp_avg_sq) / bias.root + eps);
    }
    inline void operator()(T& param, T grad, T& exp_avg) const {
        exp_avg = exp_avg + one_minus_beta1 * (grad - exp_avg);
        param = param - step_size * exp_avg;
    }
    inline void operator()(T& param, T grad) const { param = param - step_size * grad; }
};

template <class T>
using RowwiseAdam = RowwiseAdamRule<T, true, false>;
template <class T>
using RowwiseAdamPerRow = RowwiseAdamRule<T, true, true>;
template <class T>
using RowwiseAdamWithoutMomentum = RowwiseAdamRule<T, false, false>;
template <class T>
using RowwiseAdamWithoutMomentumPerRow = RowwiseAdamRule<T, false, true>;

}  // namespace
}  // namespace sparsestep
