// What rules may use beyond + - * /: operations that IEEE 754 rounds the same everywhere; and
// powers, exponentials and logarithms, which are taken one by one, in double, by the system's one
// implementation.
#pragma once

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

template <class T>
inline T magnitude(T value) {
    return value < 0 ? -value : value;
}

}  // namespace
}  // namespace sparsestep
