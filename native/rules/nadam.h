// NAdam as torch.optim.NAdam has it: Adam with Nesterov momentum, which grows with the steps.
// The Python twin is src/sparsestep/optim/nadam.py.
#pragma once

#include "rules/math.h"

namespace sparsestep {
namespace {

template <class T>
struct NAdam {
    static constexpr const char* name = "nadam";
    static constexpr int states = 2;
    static constexpr int slot_states = 0;
    static constexpr bool wants_mean_square = false;
    static constexpr bool has_fixed_sizes = false;
    static constexpr int options = 5;  // lr, betas, eps, momentum_decay

    T one_minus_beta1, beta2, one_minus_beta2, eps, along_grad, along_average, root;

    NAdam(const double* o, double step)
        : one_minus_beta1(T(1 - o[1])), beta2(T(o[2])), one_minus_beta2(T(1 - o[2])), eps(T(o[3])) {
        const double now = momentum(step, o[1], o[4]), following = momentum(step + 1, o[1], o[4]);
        const double product = momentum_product(step, o[1], o[4]);
        along_grad = T(o[0] * (1 - now) / (1 - product));
        along_average = T(o[0] * following / (1 - product * following));
        root = T(square_root(1 - power(o[2], step)));
    }

    static double momentum(double step, double beta1, double momentum_decay) {
        return beta1 * (1 - 0.5 * power(0.96, step * momentum_decay));
    }

    // Of all steps so far, in float32 as torch has it; 0 if it no longer matters.
    static double momentum_product(double step, double beta1, double momentum_decay) {
        float product = 1;
        for (double i = 1; i <= step; ++i) {
            if (product < 1e-20) return 0;
            product = product * float(momentum(i, beta1, momentum_decay));
        }
        return product;
    }

    inline void operator()(T& param, T grad, T& exp_avg, T& exp_avg_sq) const {
        exp_avg = exp_avg + one_minus_beta1 * (grad - exp_avg);
        exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * grad * grad;
        const T move = along_grad * grad + along_average * exp_avg;
        param = param - move / (square_root(exp_avg_sq) / root + eps);
    }
};

}  // namespace
}  // namespace sparsestep
