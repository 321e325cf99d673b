// Adagrad with one sum per row, fed by the mean of the row's squared gradient.
// The Python twin is src/sparsestep/optim/rowwise_adagrad.py.
#pragma once

#include "rules/math.h"

namespace sparsestep {
namespace {

template <class T>
struct RowwiseAdagrad {
    static constexpr const char* name = "rowwise_adagrad";
    static constexpr int states = 0;
    static constexpr int slot_states = 1;
    static constexpr bool wants_mean_square = true;
    static constexpr bool has_fixed_sizes = true;
    static constexpr int options = 2;  // lr, eps

    T lr, eps;
    T step_size = 0;

    RowwiseAdagrad(const double* o, double) : lr(T(o[0])), eps(T(o[1])) {}

    void enter_slot(T* row_state, T mean_square) {
        T& sum = row_state[0];
        sum = sum + mean_square;
        step_size = lr / (square_root(sum) + eps);
    }
    inline void operator()(T& param, T grad) const { param = param - step_size * grad; }
};

}  // namespace
}  // namespace sparsestep
