// Stochastic gradient descent as torch.optim.SGD has it, without and with momentum.
// The Python twin is src/sparsestep/rules/sgd.py.
#pragma once

namespace sparsestep {
namespace {

template <class T>
struct SGD {
    static constexpr const char* name = "sgd";
    static constexpr int states = 0;
    static constexpr int slot_states = 0;
    static constexpr bool wants_mean_square = false;
    static constexpr bool is_usual = true;
    static constexpr int coefficients = 1;

    T lr;

    explicit SGD(const double* c) : lr(T(c[0])) {}

    inline void operator()(T& param, T grad) const { param = param - lr * grad; }
};

template <class T>
struct MomentumSGD {
    static constexpr const char* name = "sgd_momentum";
    static constexpr int states = 1;
    static constexpr int slot_states = 0;
    static constexpr bool wants_mean_square = false;
    static constexpr bool is_usual = true;
    static constexpr int coefficients = 5;

    // buffer = keep * buffer + take * gradient; the step is along share * gradient + rest * buffer:
    // 0 and 1 for plain momentum, 1 and the momentum for Nesterov's.
    T lr, keep, take, share, rest;

    explicit MomentumSGD(const double* c)
        : lr(T(c[0])), keep(T(c[1])), take(T(c[2])), share(T(c[3])), rest(T(c[4])) {}

    inline void operator()(T& param, T grad, T& momentum_buffer) const {
        momentum_buffer = keep * momentum_buffer + take * grad;
        param = param - lr * (share * grad + rest * momentum_buffer);
    }
};

}  // namespace
}  // namespace sparsestep
