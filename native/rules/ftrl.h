// Follow the regularised leader, proximal, per coordinate.
// The Python twin is src/sparsestep/optim/ftrl.py.
#pragma once

#include "rules/math.h"

namespace sparsestep {
namespace {

template <class T>
struct Ftrl {
    static constexpr const char* name = "ftrl";
    static constexpr int states = 2;
    static constexpr int slot_states = 0;
    static constexpr bool wants_mean_square = false;
    static constexpr bool has_fixed_sizes = false;
    static constexpr int options = 4;  // lr, beta, l1, l2

    T rate, beta, l1, l2;  // rate: 1 / lr, or 0 for lr = 0, where the parameter rests

    Ftrl(const double* o, double)
        : rate(T(o[0] != 0 ? 1 / o[0] : 0)), beta(T(o[1])), l1(T(o[2])), l2(T(o[3])) {}

    inline void operator()(T& param, T grad, T& linear, T& sum) const {
        const T before = square_root(sum);
        sum = sum + grad * grad;
        const T root = square_root(sum);
        linear = linear + grad - (root - before) * rate * param;
        param = rate == 0 ? param : solve(linear, root);
    }

    // The parameter, which is a function of its state; `root` is that of `sum`.
    inline T solve(T linear, T root) const {
        const T solution = (sign(linear) * l1 - linear) / ((beta + root) * rate + l2);
        return absolute(linear) <= l1 ? T(0) : solution;
    }

    // Without a gradient; the rate may have changed.
    bool rests() const { return rate == 0; }
    inline T recompute(T linear, T sum) const { return solve(linear, square_root(sum)); }
};

}  // namespace
}  // namespace sparsestep
