// Adam as torch.optim.Adam has it (eps after bias correction), and AMSGrad, which divides by the
// largest second moment so far. The Python twin is src/sparsestep/optim/adam.py.
#pragma once

#include "rules/bias_correction.h"

namespace sparsestep {
namespace {

template <class T, bool per_row>
struct AdamBase {
    static constexpr int slot_states = BiasCorrection<T, per_row>::slot_states;
    static constexpr bool wants_mean_square = false;
    static constexpr bool has_fixed_sizes = !per_row;
    static constexpr int options = 4;  // lr, betas, eps

    T one_minus_beta1, beta2, one_minus_beta2, eps;
    BiasCorrection<T, per_row> bias;

    AdamBase(const double* o, double step)
        : one_minus_beta1(T(1 - o[1])),
          beta2(T(o[2])),
          one_minus_beta2(T(1 - o[2])),
          eps(T(o[3])),
          bias(o, step) {}

    void enter_slot(T* row_state, T) { bias.count(row_state[0]); }

    void average(T grad, T& exp_avg, T& exp_avg_sq) const {
        exp_avg = exp_avg + one_minus_beta1 * (grad - exp_avg);
        exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * grad * grad;
    }
    T moved(T param, T exp_avg, T square) const {
        return param - bias.step_size * exp_avg / (square_root(square) / bias.root + eps);
    }
};

template <class T, bool per_row>
struct AdamRule : AdamBase<T, per_row> {
    static constexpr const char* name = per_row ? "adam_per_row" : "adam";
    static constexpr int states = 2;
    using AdamBase<T, per_row>::AdamBase;

    inline void operator()(T& param, T grad, T& exp_avg, T& exp_avg_sq) const {
        this->average(grad, exp_avg, exp_avg_sq);
        param = this->moved(param, exp_avg, exp_avg_sq);
    }
};

template <class T, bool per_row>
struct AMSGradRule : AdamBase<T, per_row> {
    static constexpr const char* name = per_row ? "amsgrad_per_row" : "amsgrad";
    static constexpr int states = 3;
    using AdamBase<T, per_row>::AdamBase;

    inline void operator()(T& param, T grad, T& exp_avg, T& exp_avg_sq, T& max_exp_avg_sq) const {
        this->average(grad, exp_avg, exp_avg_sq);
        // Not less or equal: so that a NaN is kept, as torch.maximum does.
        max_exp_avg_sq = exp_avg_sq <= max_exp_avg_sq       ? max_exp_avg_sq
                         : max_exp_avg_sq != max_exp_avg_sq ? max_exp_avg_sq
                                                            : exp_avg_sq;
        param = this->moved(param, exp_avg, max_exp_avg_sq);
    }
};

template <class T>
using Adam = AdamRule<T, false>;
template <class T>
using AdamPerRow = AdamRule<T, true>;
template <class T>
using AMSGrad = AMSGradRule<T, false>;
template <class T>
using AMSGradPerRow = AMSGradRule<T, true>;

}  // namespace
}  // namespace sparsestep
