// Adagrad as torch.optim.Adagrad has it. The Python twin is src/sparsestep/rules/adagrad.py.
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
    static constexpr bool is_usual = true;
    static constexpr int coefficients = 2;

    T step_size, eps;

    explicit Adagrad(const double* c) : step_size(T(c[0])), eps(T(c[1])) {}

    inline void operator()(T& param, T grad, T& sum) const {
        sum = sum + grad * grad;
        param = param - step_size * grad / (square_root(sum) + eps);
    }
};

}  // namespace
}  // namespace sparsestep
