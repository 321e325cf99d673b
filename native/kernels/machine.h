// The machine that runs a program: each instruction is a loop over a tile.
//
// Operations round as IEEE 754 says, the same on every instruction set. exp, log and pow are taken
// in double, one by one, by the system's one implementation: so their bits do not depend on the
// width of a vector either.
//
// Included by programs.cpp alone; everything has internal linkage (see types.h for the reason).
#pragma once

#include <cstdint>

#include "core/program.h"
#include "kernels/rows.h"
#include "rules/math.h"

namespace sparsestep {
namespace {

// How much of a row is computed at a time: so little that all registers of a program stay in the
// first-level cache.
constexpr int64_t chunk = 64;

// Sums over a row are taken in as many lanes as the widest vector has, on every machine: the order
// of a sum decides its last bits. apply.h does the same.
constexpr int row_lanes = 16;

template <class T>
inline T larger(T a, T b) {  // NaN wins, as in torch
    return a > b || a != a ? a : b;
}
template <class T>
inline T smaller(T a, T b) {
    return a < b || a != a ? a : b;
}

// Runs instructions over tiles of n elements; `fixed`: n, where it is known to the compiler, else
// 0. `to` may be one of the operands.
template <class T, int64_t fixed>
__attribute__((noinline)) void run(const Instruction* at, const Instruction* end, T* const* tiles,
                                   int64_t given) {
    const int64_t n = fixed ? fixed : given;
    for (; at != end; ++at) {
        T* const to = tiles[at->to];
        const T *const a = tiles[at->a], *const b = tiles[at->b], *const c = tiles[at->c];
        const T* const d = tiles[at->d];
#define SPARSESTEP_EACH(expression)                                                      \
    {                                                                                    \
        SPARSESTEP_IVDEP _Pragma("GCC unroll 8") for (int64_t j = 0; j < n; ++j) to[j] = \
            expression;                                                                  \
        break;                                                                           \
    }
        switch (at->code) {
            case Code::add: SPARSESTEP_EACH(a[j] + b[j])
            case Code::sub: SPARSESTEP_EACH(a[j] - b[j])
            case Code::mul: SPARSESTEP_EACH(a[j] * b[j])
            case Code::div: SPARSESTEP_EACH(a[j] / b[j])
            case Code::maximum: SPARSESTEP_EACH(larger(a[j], b[j]))
            case Code::minimum: SPARSESTEP_EACH(smaller(a[j], b[j]))
            case Code::pow: SPARSESTEP_EACH(T(power(double(a[j]), double(b[j]))))
            case Code::lt: SPARSESTEP_EACH(T(a[j] < b[j]))
            case Code::le: SPARSESTEP_EACH(T(a[j] <= b[j]))
            case Code::gt: SPARSESTEP_EACH(T(a[j] > b[j]))
            case Code::ge: SPARSESTEP_EACH(T(a[j] >= b[j]))
            case Code::eq: SPARSESTEP_EACH(T(a[j] == b[j]))
            case Code::ne: SPARSESTEP_EACH(T(a[j] != b[j]))
            case Code::neg: SPARSESTEP_EACH(-a[j])
            case Code::abs: SPARSESTEP_EACH(absolute(a[j]))
            case Code::sign: SPARSESTEP_EACH(sign(a[j]))
            case Code::sqrt: SPARSESTEP_EACH(square_root(a[j]))
            case Code::rsqrt: SPARSESTEP_EACH(T(1) / square_root(a[j]))
            case Code::reciprocal: SPARSESTEP_EACH(T(1) / a[j])
            case Code::exp: SPARSESTEP_EACH(T(exponential(double(a[j]))))
            case Code::log: SPARSESTEP_EACH(T(logarithm(double(a[j]))))
            case Code::copy: SPARSESTEP_EACH(a[j])
            case Code::where: SPARSESTEP_EACH(a[j] != 0 ? b[j] : c[j])
            case Code::mul_add: SPARSESTEP_EACH(a[j] * b[j] + c[j])
            case Code::mul_sub: SPARSESTEP_EACH(a[j] * b[j] - c[j])
            case Code::sub_mul: SPARSESTEP_EACH(c[j] - a[j] * b[j])
            case Code::mul_mul_add: SPARSESTEP_EACH(a[j] * b[j] + c[j] * d[j])
            case Code::mul_div: SPARSESTEP_EACH(a[j] * b[j] / c[j])
            case Code::sub_div: SPARSESTEP_EACH(c[j] - a[j] / b[j])
            case Code::sub_mul_div: SPARSESTEP_EACH(d[j] - a[j] * b[j] / c[j])
            case Code::sqrt_add: SPARSESTEP_EACH(square_root(a[j]) + b[j])
            case Code::sqrt_div: SPARSESTEP_EACH(square_root(a[j]) / b[j])
            case Code::sqrt_div_add: SPARSESTEP_EACH(square_root(a[j]) / b[j] + c[j])
            default: break;  // those that go from tiles to rows or back
        }
#undef SPARSESTEP_EACH
    }
}

// One sum, mean or largest of a row, while it is being taken.
template <class T>
struct Reduction {
    T lanes[row_lanes];

    void begin(Code code) {
        for (T& lane : lanes) lane = code == Code::amax ? -T(__builtin_inf()) : T(0);
    }
    SPARSESTEP_INLINE void add(Code code, const T* from, int64_t n) {
        if (n == chunk) return add_chunk<chunk>(code, from, n);
        add_chunk<0>(code, from, n);
    }
    T end(Code code, int64_t columns) {
        if (code == Code::amax)
            return fold([](T a, T b) SPARSESTEP_LAMBDA { return larger(a, b); });
        const T sum = fold([](T a, T b) SPARSESTEP_LAMBDA { return a + b; });
        return code == Code::mean ? sum / T(columns) : sum;
    }

private:
    // `fixed`: n, where it is known to the compiler, else 0.
    template <int64_t fixed>
    __attribute__((noinline)) void add_chunk(Code code, const T* __restrict from, int64_t given) {
        const int64_t n = fixed ? fixed : given;
        if (code == Code::amax) {
            each(from, n, [](T lane, T value) SPARSESTEP_LAMBDA { return larger(value, lane); });
        } else {
            each(from, n, [](T lane, T value) SPARSESTEP_LAMBDA { return lane + value; });
        }
    }
    // Each half onto the other, until one is left; the lengths are known to the compiler.
    template <int half = row_lanes / 2, class Take>
    SPARSESTEP_INLINE T fold(const Take& take) {
        for (int lane = 0; lane < half; ++lane) lanes[lane] = take(lanes[lane], lanes[lane + half]);
        if constexpr (half > 1) return fold<half / 2>(take);
        return lanes[0];
    }
    template <class Take>
    SPARSESTEP_INLINE void each(const T* __restrict from, int64_t n, const Take& take) {
        int64_t j = 0;
        for (; j + row_lanes <= n; j += row_lanes) {
            for (int lane = 0; lane < row_lanes; ++lane) {
                lanes[lane] = take(lanes[lane], from[j + lane]);
            }
        }
        const int rest = int(n - j);
        for (int lane = 0; lane < rest; ++lane) lanes[lane] = take(lanes[lane], from[j + lane]);
    }
};

}  // namespace
}  // namespace sparsestep
