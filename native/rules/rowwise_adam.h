// Adam with one second moment per row, fed by the mean of the row's squared gradient; the first
// moment is kept per element. The Python twin is src/sparsestep/rules/rowwise_adam.py.
#pragma once

#include "rules/bias.h"

namespace sparsestep {
namespace {

template <class T, bool per_row>
struct RowwiseAdamWith {
    static constexpr const char* name = per_row ? "rowwise_adam_per_row" : "rowwise_adam";
    static constexpr int states = 1;
    static constexpr int slot_states = 1 + Bias<T, per_row>::slot_states;
    static constexpr bool wants_mean_square = true;
    static constexpr bool is_usual = !per_row;
    static constexpr int coefficients = 4 + Bias<T, per_row>::coefficients;

    T one_minus_beta1, beta2, one_minus_beta2, eps;
    Bias<T, per_row> bias;
    T step_size = 0;

    explicit RowwiseAdamWith(const double* c)
        : one_minus_beta1(T(c[0])),
          beta2(T(c[1])),
          one_minus_beta2(T(c[2])),
          eps(T(c[3])),
          bias(c + 4) {}

    void enter_slot(T* kept, T mean_square) {
        if constexpr (per_row) bias.count(kept[1]);
        T& exp_avg_sq = kept[0];
        exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * mean_square;
        step_size = bias.step_size / (square_root(exp_avg_sq) / bias.root + eps);
    }
    inline void operator()(T& param, T grad, T& exp_avg) const {
        exp_avg = exp_avg + one_minus_beta1 * (grad - exp_avg);
        param = param - step_size * exp_avg;
    }
};

template <class T>
using RowwiseAdam = RowwiseAdamWith<T, false>;
template <class T>
using RowwiseAdamPerRow = RowwiseAdamWith<T, true>;

}  // namespace
}  // namespace sparsestep
