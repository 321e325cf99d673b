// The limit that benchmarks are measured against: the least that any implementation of an update
// must do. It is told in advance which slots come and which entries belong to each, so it only
// reads each gradient row once and reads and writes each touched row of parameter and state once.
//
// No optimizer uses it. It is written apart from the loop that does, so that neither hides a
// weakness of the other.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "core/types.h"

namespace sparsestep {
namespace {

constexpr int64_t limit_line = 16;  // floats in a cache line
constexpr int64_t limit_ahead = 16;

inline __attribute__((always_inline)) void limit_prefetch(const float* row, int64_t dim) {
    for (int64_t j = 0; j < dim; j += limit_line) __builtin_prefetch(row + j, 0, 2);
}

template <class Rule, class... State>
inline __attribute__((always_inline)) void limit_update(const Rule rule, int64_t dim,
                                                        float* __restrict param,
                                                        const float* __restrict grad,
                                                        State* __restrict... state) {
#pragma GCC ivdep
    for (int64_t j = 0; j < dim; ++j) rule(param[j], grad[j], state[j]...);
}

// With the row length known to the compiler, or with any (0).
template <class Rule, int64_t fixed_dim, size_t... S>
void limit_rows(const LimitWork& work, int64_t begin, int64_t end, std::index_sequence<S...>) {
    const int64_t dim = fixed_dim ? fixed_dim : work.dim;
    alignas(64) float sum[max_limit_dim];
    const Rule first_rule(work.options, work.step);
    for (int64_t i = begin; i < end; ++i) {
        if (i + limit_ahead < end) {
            const int64_t slot = work.slots[i + limit_ahead];
            limit_prefetch(work.param + slot * dim, dim);
            (limit_prefetch(work.state[S] + slot * dim, dim), ...);
            for (int s = 0; s < Rule::slot_states; ++s) {
                __builtin_prefetch(work.slot_state[s] + slot, 0, 2);
            }
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
        const int64_t slot = work.slots[i];
        Rule rule = first_rule;
        if constexpr (Rule::slot_states > 0) {
            float lanes[limit_line] = {}, kept[Rule::slot_states], squares = 0;
            for (int64_t j = 0; j < dim; j += limit_line) {
                for (int64_t l = 0; l < limit_line; ++l) lanes[l] += grad[j + l] * grad[j + l];
            }
            for (float lane : lanes) squares += lane;
            for (int s = 0; s < Rule::slot_states; ++s) kept[s] = work.slot_state[s][slot];
            rule.enter_slot(kept, squares / float(dim));
            for (int s = 0; s < Rule::slot_states; ++s) work.slot_state[s][slot] = kept[s];
        }
        limit_update(rule, dim, work.param + slot * dim, grad, (work.state[S] + slot * dim)...);
    }
}

// `dims` are the row lengths that are known to the compiler.
template <template <class> class Rule, int64_t... dims>
void limit(const LimitWork& work, int64_t begin, int64_t end) {
    constexpr auto states = std::make_index_sequence<Rule<float>::states>();
    bool done = false;
    ((work.dim == dims ? (limit_rows<Rule<float>, dims>(work, begin, end, states), done = true)
                       : false),
     ...);
    if (!done) limit_rows<Rule<float>, 0>(work, begin, end, states);
}

}  // namespace
}  // namespace sparsestep
