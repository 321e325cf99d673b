// What rules may use beyond + - * /: operations that IEEE 754 rounds the same everywhere; and
// powers, exponentials and logarithms, which are taken one by one, in double, by the system's one
// implementation.
#pragma once

#include "core/compiler.h"

namespace sparsestep {
namespace {

inline float square_root(float value) { return __builtin_sqrtf(value); }
inline double square_root(double value) { return __builtin_sqrt(value); }
inline double power(double base, double exponent) { return __builtin_pow(base, exponent); }
inline double exponential(double value) { return __builtin_exp(value); }
inline double logarithm(double value) { return __builtin_log(value); }
inline float absolute(float value) { return __builtin_fabsf(value); }
inline double absolute(double value) { return __builtin_fabs(value); }

template <class T>
inline T sign(T value) {
    return T(value > 0) - T(value < 0);
}

// NaN wins, as in torch.
template <class T>
inline T larger(T a, T b) {
    return a > b || a != a ? a : b;
}
template <class T>
inline T smaller(T a, T b) {
    return a < b || a != a ? a : b;
}

// Sums over a row are taken in as many lanes as the widest vector has, on every machine: the order
// of a sum decides its last bits.
constexpr int row_lanes = 16;

// Combines lanes by halves; the lengths are known to the compiler.
template <int half = row_lanes / 2, class T, class Combine>
SPARSESTEP_INLINE T fold(T* lanes, const Combine& combine) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] = combine(lanes[lane], lanes[lane + half]);
    if constexpr (half > 1) return fold<half / 2>(lanes, combine);
    return lanes[0];
}

}  // namespace
}  // namespace sparsestep
