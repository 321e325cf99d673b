// RMSprop as torch.optim.RMSprop has it: with or without momentum, centered or not.
// The Python twin is src/sparsestep/optim/rmsprop.py.
#pragma once

#include "rules/math.h"

namespace sparsestep {
namespace {

template <class T>
struct RMSpropBase {
    static constexpr int slot_states = 0;
    static constexpr bool wants_mean_square = false;
    static constexpr bool has_fixed_sizes = false;
    static constexpr int options = 4;  // lr, alpha, eps, momentum

    T alpha, one_minus_alpha, eps, lr, momentum;

    RMSpropBase(const double* o, double)
        : alpha(T(o[1])),
          one_minus_alpha(T(1 - o[1])),
          eps(T(o[2])),
          lr(T(o[0])),
          momentum(T(o[3])) {}

    T root(T grad, T& square_avg) const {
        square_avg = alpha * square_avg + one_minus_alpha * grad * grad;
        return square_root(square_avg) + eps;
    }
    T root(T grad, T& square_avg, T& grad_avg) const {
        square_avg = alpha * square_avg + one_minus_alpha * grad * grad;
        grad_avg = grad_avg + one_minus_alpha * (grad - grad_avg);
        return square_root(square_avg - grad_avg * grad_avg) + eps;
    }
    T with_momentum(T ratio, T& buffer) const { return buffer = momentum * buffer + ratio; }
};

template <class T>
struct RMSprop : RMSpropBase<T> {
    static constexpr const char* name = "rmsprop";
    static constexpr int states = 1;
    using RMSpropBase<T>::RMSpropBase;

    inline void operator()(T& param, T grad, T& square_avg) const {
        param = param - this->lr * grad / this->root(grad, square_avg);
    }
};

template <class T>
struct MomentumRMSprop : RMSpropBase<T> {
    static constexpr const char* name = "rmsprop_momentum";
    static constexpr int states = 2;
    using RMSpropBase<T>::RMSpropBase;

    inline void operator()(T& param, T grad, T& square_avg, T& momentum_buffer) const {
        const T ratio = grad / this->root(grad, square_avg);
        param = param - this->lr * this->with_momentum(ratio, momentum_buffer);
    }
};

template <class T>
struct CenteredRMSprop : RMSpropBase<T> {
    static constexpr const char* name = "rmsprop_centered";
    static constexpr int states = 2;
    using RMSpropBase<T>::RMSpropBase;

    inline void operator()(T& param, T grad, T& square_avg, T& grad_avg) const {
        param = param - this->lr * grad / this->root(grad, square_avg, grad_avg);
    }
};

template <class T>
struct CenteredMomentumRMSprop : RMSpropBase<T> {
    static constexpr const char* name = "rmsprop_centered_momentum";
    static constexpr int states = 3;
    using RMSpropBase<T>::RMSpropBase;

    inline void operator()(T& param, T grad, T& square_avg, T& momentum_buffer, T& grad_avg) const {
        const T ratio = grad / this->root(grad, square_avg, grad_avg);
        param = param - this->lr * this->with_momentum(ratio, momentum_buffer);
    }
};

}  // namespace
}  // namespace sparsestep
