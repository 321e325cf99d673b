// Lion: a step of constant size along the sign of an average.
// The Python twin is src/sparsestep/optim/lion.py.
#pragma once

#include "rules/math.h"

namespace sparsestep {
namespace {

template <class T>
struct Lion {
    static constexpr const char* name = "lion";
    static constexpr int states = 1;
    static constexpr int slot_states = 0;
    static constexpr bool wants_mean_square = false;
    static constexpr bool has_fixed_sizes = true;
    static constexpr int options = 3;  // lr, betas

    T lr, one_minus_beta1, one_minus_beta2;

    Lion(const double* o, double)
        : lr(T(o[0])), one_minus_beta1(T(1 - o[1])), one_minus_beta2(T(1 - o[2])) {}

    inline void operator()(T& param, T grad, T& exp_avg) const {
        param = param - lr * sign(exp_avg + one_minus_beta1 * (grad - exp_avg));
        exp_avg = exp_avg + one_minus_beta2 * (grad - exp_avg);
    }
};

}  // namespace
}  // namespace sparsestep
