// The one loop: for each slot that was touched, sum its gradient rows in order of appearance, then
// let the rule update parameter and state in place. One pass over memory, nothing the size of the
// gradient in between.
//
// Included by kernels.cpp alone; everything has internal linkage (see types.h for the reason).
#pragma once

#include <type_traits>
#include <utility>

#include "tile.h"
#include "types.h"

namespace sparsestep {
namespace {

// How far ahead rows are asked for. Long enough to hide a trip to memory, short enough that the
// rows are still in the cache when their turn comes.
constexpr int64_t prefetch_distance = 10;
constexpr int64_t prefetch_bytes = 1024;
constexpr int64_t cache_line = 64;

struct KeyedEntries {
    const uint64_t* keys;
    int32_t bits;
    int64_t slot(int64_t i) const { return int64_t(keys[i] >> bits); }
    int64_t entry(int64_t i) const { return int64_t(keys[i] & ((uint64_t(1) << bits) - 1)); }
};

struct SortedEntries {
    const int64_t* positions;
    int64_t first;
    int64_t slot(int64_t i) const { return positions[first + i]; }
    int64_t entry(int64_t i) const { return first + i; }
};

struct WholeParameter {
    int64_t slot(int64_t) const { return 0; }
    int64_t entry(int64_t) const { return 0; }
};

inline int64_t bytes_of(Dtype dtype) {
    return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2;
}

inline void prefetch_row(const View& view, int64_t slot, int64_t begin, int64_t end) {
    const int64_t size = bytes_of(view.dtype);
    const char* row =
        static_cast<const char*>(view.data) + element_offset(view, slot, begin) * size;
    const int64_t bytes = (end - begin) * view.element_stride * size;
    for (int64_t at = 0; at < bytes && at < prefetch_bytes; at += cache_line) {
        __builtin_prefetch(row + at, 1, 3);
    }
}

template <class Rule>
struct Loop;

template <template <class> class RuleOf, class T>
struct Loop<RuleOf<T>> {
    using Rule = RuleOf<T>;
    static constexpr int states = Rule::states;

    // The gradient of one slot: the sum of its entries [i, end), or the stored row where that is it.
    template <class Source>
    static const T* gradient(const Job& job, const Source& source, int64_t i, int64_t end,
                             int64_t column, int64_t n, T* sum, T* scratch) {
        const T* row = load<T>(job.values, source.entry(i), column, n, sum);
        if (end - i == 1 && !job.negate) return row;
        if (row != sum) std::memcpy(sum, row, size_t(n) * sizeof(T));
        for (int64_t k = i + 1; k < end; ++k) {
            if (k + prefetch_distance < end) {
                prefetch_row(job.values, source.entry(k + prefetch_distance), column, column + n);
            }
            const T* next = load<T>(job.values, source.entry(k), column, n, scratch);
            for (int64_t j = 0; j < n; ++j) sum[j] += next[j];
        }
        if (job.negate) {
            for (int64_t j = 0; j < n; ++j) sum[j] = -sum[j];
        }
        return sum;
    }

    template <size_t... S>
    static void update(const Rule& rule, T* __restrict param, const T* __restrict grad,
                       T* const* state, int64_t n, std::index_sequence<S...>) {
        update_tile(rule, param, grad, n, state[S]...);
    }

    template <class... State>
    static void update_tile(const Rule& rule, T* __restrict param, const T* __restrict grad,
                            int64_t n, State* __restrict... state) {
        for (int64_t j = 0; j < n; ++j) rule(param[j], grad[j], state[j]...);
    }

    template <class Source>
    static void run(const Job& job, const Source& source, int64_t count, int64_t begin,
                    int64_t end) {
        const Rule rule(job.coefficients);
        alignas(cache_line) T sum[tile_size], spare[tile_size], param_tile[tile_size];
        alignas(cache_line) T state_tiles[states > 0 ? states : 1][tile_size];
        for (int64_t i = 0; i < count;) {
            const int64_t slot = source.slot(i);
            int64_t next = i + 1;
            while (next < count && source.slot(next) == slot) ++next;
            prefetch_ahead(job, source, i, next, count, begin, end);
            for (int64_t column = begin; column < end; column += tile_size) {
                const int64_t n = end - column < tile_size ? end - column : tile_size;
                const T* grad = gradient(job, source, i, next, column, n, sum, spare);
                T* param = load<T>(job.param, slot, column, n, param_tile);
                T* state[states > 0 ? states : 1];
                for (int s = 0; s < states; ++s) {
                    state[s] = load<T>(job.state[s], slot, column, n, state_tiles[s]);
                }
                update(rule, param, grad, state, n, std::make_index_sequence<states>());
                store<T>(job.param, slot, column, n, param);
                for (int s = 0; s < states; ++s) {
                    store<T>(job.state[s], slot, column, n, state[s]);
                }
            }
            i = next;
        }
    }

    // Entries [i, next) are being worked on: ask for what stands the same number of entries ahead.
    template <class Source>
    static void prefetch_ahead(const Job& job, const Source& source, int64_t i, int64_t next,
                               int64_t count, int64_t begin, int64_t end) {
        int64_t from = i == 0 ? 1 : i + prefetch_distance;
        int64_t to = next + prefetch_distance;
        if (to > count) to = count;
        if (from < next) from = next;
        int64_t last = -1;
        for (int64_t k = from; k < to; ++k) {
            prefetch_row(job.values, source.entry(k), begin, end);
            const int64_t slot = source.slot(k);
            if (slot == last) continue;
            last = slot;
            prefetch_row(job.param, slot, begin, end);
            for (int s = 0; s < states; ++s) prefetch_row(job.state[s], slot, begin, end);
        }
    }

    static void apply(const Job& job, const Entries& entries, int64_t begin, int64_t end) {
        if (entries.keys) {
            run(job, KeyedEntries{entries.keys, job.entry_bits}, entries.count, begin, end);
        } else if (job.positions) {
            run(job, SortedEntries{job.positions, entries.first}, entries.count, begin, end);
        } else {
            run(job, WholeParameter{}, entries.count, begin, end);
        }
    }
};

template <template <class> class Rule>
constexpr RuleKernels kernels_of() {
    return {Rule<float>::name, Rule<float>::states, Rule<float>::coefficients,
            &Loop<Rule<float>>::apply, &Loop<Rule<double>>::apply};
}

}  // namespace
}  // namespace sparsestep
