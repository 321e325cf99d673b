// Stochastic gradient descent as torch.optim.SGD has it, without and with momentum.
// The Python twin is src/sparsestep/optim/sgd.py.
#pragma once

namespace sparsestep {
namespace {

template <class T>
struct SGD {
    static constexpr const char* name = "sgd";
    static constexpr int states = 0;
    static constexpr int slot_states = 0;
    static constexpr bool wants_mean_square = false;
    static constexpr bool has_fixed_sizes = true;
    static constexpr int options = 1;  // lr

    T lr;

    SGD(const double* o, double) : lr(T(o[0])) {}

    inline void operator()(T& param, T grad) const { param = param - lr * grad; }
};

template <class T>
struct MomentumSGD {
    static constexpr const char* name = "sgd_momentum";
    static constexpr int states = 1;
    static constexpr int slot_states = 0;
    static constexpr bool wants_mean_square = false;
    static constexpr bool has_fixed_sizes = true;
    static constexpr int options = 4;  // lr, momentum, dampening, nesterov

    // buffer = keep * buffer + take * gradient; the step is along share * gradient + rest * buffer:
    // 0 and 1 for plain momentum, 1 and the momentum for Nesterov's.
    T lr, keep, take, share, rest;

    // A first step takes the gradient whole, as torch does.
    MomentumSGD(const double* o, double step)
        : lr(T(o[0])),
          keep(T(step == 1 ? 0 : o[1])),
          take(T(step == 1 ? 1 : 1 - o[2])),
          share(T(o[3] != 0 ? 1 : 0)),
          rest(T(o[3] != 0 ? o[1] : 1)) {}

    inline void operator()(T& param, T grad, T& momentum_buffer) const {
        momentum_buffer = keep * momentum_buffer + take * grad;
        param = param - lr * (share * grad + rest * momentum_buffer);
    }
};

}  // namespace
}  // namespace sparsestep
