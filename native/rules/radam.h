// RAdam as torch.optim.RAdam has it: Adam whose step is rectified for the variance of its second
// moment. The first steps, before there is enough of it, do not divide by it.
// The Python twin is src/sparsestep/optim/radam.py.
#pragma once

#include "rules/bias_correction.h"

namespace sparsestep {
namespace {

template <class T>
struct RAdam {
    static constexpr const char* name = "radam";
    static constexpr int states = 2;
    static constexpr int slot_states = 0;
    static constexpr bool wants_mean_square = false;
    static constexpr bool has_fixed_sizes = false;
    static constexpr int options = 4;  // lr, betas, eps

    T one_minus_beta1, beta2, one_minus_beta2, eps, step_size;
    T divides;  // 1 or 0; a loop with a bool would not be vectorized

    RAdam(const double* o, double step)
        : one_minus_beta1(T(1 - o[1])), beta2(T(o[2])), one_minus_beta2(T(1 - o[2])), eps(T(o[3])) {
        const BiasCorrection<double, false> bias(o, step);
        const double left = power(o[2], step);
        const double rho_inf = 2 / (1 - o[2]) - 1;
        const double rho = rho_inf - 2 * step * left / (1 - left);
        divides = T(rho > 5);
        double size = bias.step_size;
        if (rho > 5) {
            const double rect = square_root((rho - 4) * (rho - 2) * rho_inf /
                                            ((rho_inf - 4) * (rho_inf - 2) * rho));
            size = size * bias.root * rect;
        }
        step_size = T(size);
    }

    inline void operator()(T& param, T grad, T& exp_avg, T& exp_avg_sq) const {
        exp_avg = exp_avg + one_minus_beta1 * (grad - exp_avg);
        exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * grad * grad;
        const T root = square_root(exp_avg_sq) + eps;  // always: a branch would not be vectorized
        param = param - step_size * exp_avg / (divides != 0 ? root : T(1));
    }
};

}  // namespace
}  // namespace sparsestep
