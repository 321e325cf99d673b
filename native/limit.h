// The limit that benchmarks are measured against: the least that any implementation of this update
// must do. It is told in advance which slots come and which entries belong to each, so it only
// reads each gradient row once and reads and writes each touched row of parameter and moments once.
//
// No optimizer uses it. It is written apart from the loop that does, so that neither hides a
// weakness of the other.
#pragma once

#include <cstdint>
#include <cstring>

#include "rules/sparse_adam.h"
#include "types.h"

namespace sparsestep {
namespace {

constexpr int64_t limit_line = 16;  // floats in a cache line
constexpr int64_t limit_ahead = 16;

inline __attribute__((always_inline)) void limit_prefetch(const float* row, int64_t dim) {
    for (int64_t j = 0; j < dim; j += limit_line) __builtin_prefetch(row + j, 0, 2);
}

// With the row length known to the compiler, or with any (0).
template <int64_t fixed_dim>
void limit_rows(const LimitWork& work, int64_t begin, int64_t end) {
    const SparseAdam<float> rule(work.coefficients);
    const int64_t dim = fixed_dim ? fixed_dim : work.dim;
    alignas(64) float sum[max_limit_dim];
    for (int64_t i = begin; i < end; ++i) {
        if (i + limit_ahead < end) {
            const int64_t slot = work.slots[i + limit_ahead] * dim;
            limit_prefetch(work.param + slot, dim);
            limit_prefetch(work.exp_avg + slot, dim);
            limit_prefetch(work.exp_avg_sq + slot, dim);
            limit_prefetch(work.grads + work.entries[work.offsets[i + limit_ahead]] * dim, dim);
        }
        const int64_t first = work.offsets[i], last = work.offsets[i + 1];
        const float* __restrict grad = work.grads + work.entries[first] * dim;
        if (last - first > 1) {
            std::memcpy(sum, grad, size_t(dim) * sizeof(float));
            for (int64_t k = first + 1; k < last; ++k) {
                if (k + limit_ahead < work.offsets[end]) {
                    limit_prefetch(work.grads + work.entries[k + limit_ahead] * dim, dim);
                }
                const float* __restrict row = work.grads + work.entries[k] * dim;
                for (int64_t j = 0; j < dim; ++j) sum[j] += row[j];
            }
            grad = sum;
        }
        const int64_t slot = work.slots[i] * dim;
        float* __restrict param = work.param + slot;
        float* __restrict exp_avg = work.exp_avg + slot;
        float* __restrict exp_avg_sq = work.exp_avg_sq + slot;
#pragma GCC ivdep
        for (int64_t j = 0; j < dim; ++j) rule(param[j], grad[j], exp_avg[j], exp_avg_sq[j]);
    }
}

void limit(const LimitWork& work, int64_t begin, int64_t end) {
    switch (work.dim) {
        case 16: return limit_rows<16>(work, begin, end);
        case 32: return limit_rows<32>(work, begin, end);
        case 64: return limit_rows<64>(work, begin, end);
        case 128: return limit_rows<128>(work, begin, end);
        default: return limit_rows<0>(work, begin, end);
    }
}

}  // namespace
}  // namespace sparsestep
