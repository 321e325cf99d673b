// What rules may use beyond + - * /: operations that IEEE 754 rounds the same everywhere.
#pragma once

namespace sparsestep {
namespace {

inline float square_root(float value) { return __builtin_sqrtf(value); }
inline double square_root(double value) { return __builtin_sqrt(value); }

}  // namespace
}  // namespace sparsestep
