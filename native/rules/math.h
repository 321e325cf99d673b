// What rules may use beyond + - * /: operations that IEEE 754 rounds the same everywhere, and the
// power, which is taken once per row, in double, by the system's one implementation.
#pragma once

namespace sparsestep {
namespace {

inline float square_root(float value) { return __builtin_sqrtf(value); }
inline double square_root(double value) { return __builtin_sqrt(value); }
inline double power(double base, double exponent) { return __builtin_pow(base, exponent); }

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
