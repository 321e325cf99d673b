// The limit of every rule, compiled once per instruction set: CMake sets SPARSESTEP_ISA and the
// flags, which are those of the core's kernels.
#include "limit.h"

#include <cstring>
#include <utility>

#include "core/compiler.h"
#include "rules/registry.h"

namespace sparsestep {
namespace {

constexpr int64_t prefetch_distance = 16;
constexpr int64_t lookup_distance = 32;

SPARSESTEP_INLINE void prefetch(const float* row, int64_t dim) {
    for (int64_t j = 0; j < dim; j += limit_line) __builtin_prefetch(row + j, 0, 2);
}

template <class Rule, class... State>
SPARSESTEP_INLINE void update_row(const Rule rule, int64_t dim, float* __restrict param,
                                  const float* __restrict grad, State* __restrict... state) {
    SPARSESTEP_IVDEP
    for (int64_t j = 0; j < dim; ++j) rule(param[j], grad[j], state[j]...);
}

// With the row length known to the compiler, or with any (0).
template <class Rule, int64_t fixed_dim, size_t... S>
void update_rows(const LimitWork& work, int64_t begin, int64_t end, std::index_sequence<S...>) {
    const int64_t dim = fixed_dim ? fixed_dim : work.dim;
    alignas(64) float sum[max_limit_dim];
    const Rule fresh(work.options, work.step);
    for (int64_t i = begin; i < end; ++i) {
        if (i + prefetch_distance < end) {
            const int64_t slot = work.slots[i + prefetch_distance];
            prefetch(work.param + slot * dim, dim);
            (prefetch(work.state[S] + slot * dim, dim), ...);
            for (int s = 0; s < Rule::slot_states; ++s) {
                __builtin_prefetch(work.slot_state[s] + slot, 0, 2);
            }
            prefetch(work.grads + work.entries[work.offsets[i + prefetch_distance]] * dim, dim);
        }
        const int64_t first = work.offsets[i], last = work.offsets[i + 1];
        const float* __restrict grad = work.grads + work.entries[first] * dim;
        if (last - first > 1) {
            std::memcpy(sum, grad, size_t(dim) * sizeof(float));
            for (int64_t k = first + 1; k < last; ++k) {
                if (k + prefetch_distance < work.offsets[end]) {
                    prefetch(work.grads + work.entries[k + prefetch_distance] * dim, dim);
                }
                const float* __restrict row = work.grads + work.entries[k] * dim;
                for (int64_t j = 0; j < dim; ++j) sum[j] += row[j];
            }
            grad = sum;
        }
        const int64_t slot = work.slots[i];
        Rule rule = fresh;
        if constexpr (Rule::slot_states > 0) {
            float lanes[limit_line] = {}, row_state[Rule::slot_states], squares = 0;
            for (int64_t j = 0; j < dim; j += limit_line) {
                for (int64_t l = 0; l < limit_line; ++l) lanes[l] += grad[j + l] * grad[j + l];
            }
            for (float lane : lanes) squares += lane;
            for (int s = 0; s < Rule::slot_states; ++s) row_state[s] = work.slot_state[s][slot];
            rule.enter_slot(row_state, squares / float(dim));
            for (int s = 0; s < Rule::slot_states; ++s) work.slot_state[s][slot] = row_state[s];
        }
        update_row(rule, dim, work.param + slot * dim, grad, (work.state[S] + slot * dim)...);
    }
}

template <int64_t fixed_dim>
void sum_bags(const LookupWork& work, int64_t begin, int64_t end) {
    const int64_t dim = fixed_dim ? fixed_dim : work.dim, all = work.bags * work.per_bag;
    for (int64_t bag = begin; bag < end; ++bag) {
        float* __restrict sum = work.sums + bag * dim;
        for (int64_t i = bag * work.per_bag; i < (bag + 1) * work.per_bag; ++i) {
            if (i + lookup_distance < all) {
                prefetch(work.table + work.ids[i + lookup_distance] * dim, dim);
            }
            const float* __restrict row = work.table + work.ids[i] * dim;
            if (i == bag * work.per_bag) {
                std::memcpy(sum, row, size_t(dim) * sizeof(float));
            } else {
                for (int64_t j = 0; j < dim; ++j) sum[j] += row[j];
            }
        }
    }
}

void look_up(const LookupWork& work, int64_t begin, int64_t end) {
    if (work.dim == 64) return sum_bags<64>(work, begin, end);
    sum_bags<0>(work, begin, end);
}

// `dims` are the row lengths that are known to the compiler.
template <template <class> class Rule, int64_t... dims>
void limit(const LimitWork& work, int64_t begin, int64_t end) {
    constexpr auto states = std::make_index_sequence<Rule<float>::states>();
    bool done = false;
    ((work.dim == dims ? (update_rows<Rule<float>, dims>(work, begin, end, states), done = true)
                       : false),
     ...);
    if (!done) update_rows<Rule<float>, 0>(work, begin, end, states);
}

template <template <class> class Rule, int64_t... dims>
constexpr RuleLimit limit_of() {
    using Plain = Rule<float>;
    return {Plain::name, Plain::states, Plain::slot_states, Plain::options, &limit<Rule, dims...>};
}

// The usual row length; of the rule that the command measures, all that it measures.
template <template <class> class Rule>
constexpr RuleLimit limit_at_usual_dims = limit_of<Rule, 64>();
template <>
constexpr RuleLimit limit_at_usual_dims<SparseAdam> = limit_of<SparseAdam, 64, 16, 32, 128>();

#define SPARSESTEP_LIMIT(Rule) limit_at_usual_dims<Rule>,
constexpr RuleLimit rules[] = {SPARSESTEP_RULES(SPARSESTEP_LIMIT)};

}  // namespace

#define SPARSESTEP_JOIN_(a, b) a##b
#define SPARSESTEP_JOIN(a, b) SPARSESTEP_JOIN_(a, b)

LimitTable SPARSESTEP_JOIN(limits_, SPARSESTEP_ISA)() {
    return {rules, int(sizeof(rules) / sizeof(rules[0])), &look_up};
}

}  // namespace sparsestep
