// How Adam's running averages are corrected for their start at zero: with numbers that hold for the
// whole parameter and come from Python, or, per row, with the row's own count of updates.
// The Python twin is src/sparsestep/rules/bias.py.
#pragma once

#include "rules/math.h"

namespace sparsestep {
namespace {

template <class T, bool per_row>
struct Bias;

template <class T>
struct Bias<T, false> {
    static constexpr int slot_states = 0;
    static constexpr int coefficients = 2;

    T step_size;  // lr / (1 - beta1^t)
    T root;       // sqrt(1 - beta2^t)

    explicit Bias(const double* c) : step_size(T(c[0])), root(T(c[1])) {}
};

template <class T>
struct Bias<T, true> {
    static constexpr int slot_states = 1;
    static constexpr int coefficients = 3;

    double lr, beta1, beta2;
    T step_size = 0, root = 1;

    explicit Bias(const double* c) : lr(c[0]), beta1(c[1]), beta2(c[2]) {}

    void count(T& updates) {
        updates = updates + 1;
        step_size = T(lr / (1 - power(beta1, double(updates))));
        root = T(square_root(1 - power(beta2, double(updates))));
    }
};

}  // namespace
}  // namespace sparsestep
