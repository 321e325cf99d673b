// How Adam's running averages are corrected for their start at zero: with the number of the
// parameter's step, or, per row, with the row's own count of updates.
// The Python twin is src/sparsestep/optim/adam.py.
#pragma once

#include "rules/math.h"

namespace sparsestep {
namespace {

template <class T, bool per_row>
struct BiasCorrection;

template <class T>
struct BiasCorrection<T, false> {
    static constexpr int slot_states = 0;

    T step_size;  // lr / (1 - beta1^t)
    T root;       // sqrt(1 - beta2^t)

    // lr, betas
    BiasCorrection(const double* o, double step)
        : step_size(T(o[0] / (1 - power(o[1], step)))),
          root(T(square_root(1 - power(o[2], step)))) {}
};

template <class T>
struct BiasCorrection<T, true> {
    static constexpr int slot_states = 1;

    double lr, beta1, beta2;
    T step_size = 0, root = 1;

    BiasCorrection(const double* o, double) : lr(o[0]), beta1(o[1]), beta2(o[2]) {}

    void count(T& updates) {
        updates = updates + 1;
        step_size = T(lr / (1 - power(beta1, double(updates))));
        root = T(square_root(1 - power(beta2, double(updates))));
    }
};

}  // namespace
}  // namespace sparsestep
