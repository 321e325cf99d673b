// Adam's formula as torch.optim.SparseAdam has it: eps is added before bias correction.
// The Python twin is src/sparsestep/rules/sparse_adam.py; both round alike, operation by operation.
#pragma once

#include "math.h"

namespace sparsestep {
namespace {

template <class T>
struct SparseAdam {
    static constexpr const char* name = "sparse_adam";
    static constexpr int states = 2;
    static constexpr int coefficients = 4;

    T one_minus_beta1, one_minus_beta2, eps, step_size;

    explicit SparseAdam(const double* c)
        : one_minus_beta1(T(c[0])), one_minus_beta2(T(c[1])), eps(T(c[2])), step_size(T(c[3])) {}

    inline void operator()(T& param, T grad, T& exp_avg, T& exp_avg_sq) const {
        exp_avg = exp_avg + one_minus_beta1 * (grad - exp_avg);
        exp_avg_sq = exp_avg_sq + one_minus_beta2 * (grad * grad - exp_avg_sq);
        param = param - step_size * (exp_avg / (square_root(exp_avg_sq) + eps));
    }
};

}  // namespace
}  // namespace sparsestep
