// Adagrad as torch.optim.Adagrad has it. The Python twin is src/sparsestep/optim/adagrad.py.
#pragma once

#include "rules/math.h"

namespace sparsestep {
namespace {

template <class T>
struct Adagrad {
    static constexpr const char* name = "adagrad";
    static constexpr int states = 1;
    static constexpr int slot_states = 0;
    static constexpr bool wants_mean_square = false;
    static constexpr bool has_fixed_sizes = true;
    static constexpr int options = 3;  // lr, lr_decay, eps

    T step_size, eps;

    Adagrad(const double* o, double step)
        : step_size(T(o[0] / (1 + (step - 1) * o[1]))), eps(T(o[2])) {}

    inline void operator()(T& param, T grad, T& sum) const {
        sum = sum + grad * grad;
        param = param - step_size * grad / (square_root(sum) + eps);
    }
};

}  // namespace
}  // namespace sparsestep
