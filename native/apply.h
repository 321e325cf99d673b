// The one loop: for each slot that was touched, sum its gradient rows in order of appearance, then
// let the rule update parameter and state in place. One pass over memory, nothing the size of the
// gradient in between.
//
// Slots are visited in the order in which the gradient names them: the gradient is then read from
// front to back, and the rows of the table, which lie anywhere, are asked for ahead of time.
//
// Included by kernels.cpp alone; everything has internal linkage (see types.h for the reason).
#pragma once

#include <utility>

#include "tile.h"
#include "types.h"

namespace sparsestep {
namespace {

constexpr int64_t cache_line = 64;

// How many entries ahead rows are asked for: long enough to hide a trip to memory.
constexpr int64_t prefetch_distance = 16;

// How many further entries of a chain are asked for together with its first; a longer one is asked
// for while it is summed.
constexpr int prefetched_links = 4;

// The hardware itself goes on with a row that is longer than this.
constexpr int64_t prefetch_bytes = 1024;

// Always inlined: GCC takes a function that does nothing but prefetch for one without effect and
// drops the calls.
#define SPARSESTEP_INLINE inline __attribute__((always_inline))

// The rows of one tensor, columns [first_column, last_column), as tiles of T. Which of the two
// kinds it is decides once per piece, not once per row, whether there is anything to convert.
// Where the number of columns is a usual one, it is known to the compiler (`fixed`, else 0): at
// such row lengths the bookkeeping of a loop shows.
template <class T, int64_t fixed>
struct StoredRows {
    static constexpr int64_t fixed_columns = fixed;

    char* data;
    int64_t row_bytes;
    int64_t lines;

    StoredRows(const View& view, const Piece& piece)
        : data(static_cast<char*>(view.data) + piece.first_column * int64_t(sizeof(T))),
          row_bytes(view.slot_stride * int64_t(sizeof(T))) {
        const int64_t bytes = (piece.last_column - piece.first_column) * int64_t(sizeof(T));
        lines = ((bytes < prefetch_bytes ? bytes : prefetch_bytes) + cache_line - 1) / cache_line;
    }
    T* load(int64_t row, int64_t offset, int64_t, T*) const {
        return reinterpret_cast<T*>(data + row * row_bytes) + offset;
    }
    void store(int64_t, int64_t, int64_t, const T*) const {}

    // Rows are fetched into the second-level cache. The first has room for far fewer requests under
    // way, and asking for ownership at once (a prefetch for writing) would go there too.
    SPARSESTEP_INLINE void prefetch(int64_t row) const {
        const char* at = data + row * row_bytes;
        const int64_t count = fixed ? fixed * int64_t(sizeof(T)) / cache_line : lines;
        for (int64_t line = 0; line < count; ++line) {
            __builtin_prefetch(at + line * cache_line, 0, 2);
        }
    }
};

template <class T>
struct ConvertedRows {
    static constexpr int64_t fixed_columns = 0;
    View view;
    int64_t first_column;

    ConvertedRows(const View& view, const Piece& piece)
        : view(view), first_column(piece.first_column) {}
    T* load(int64_t row, int64_t offset, int64_t n, T* tile) const {
        load_tile(view, row, first_column + offset, n, tile);
        return tile;
    }
    void store(int64_t row, int64_t offset, int64_t n, const T* tile) const {
        store_tile(view, row, first_column + offset, n, tile);
    }
    SPARSESTEP_INLINE void prefetch(int64_t row) const {
        __builtin_prefetch(static_cast<const char*>(view.data) +
                               element_offset(view, row, first_column) * bytes_of(view.dtype),
                           0, 2);
    }
};

// A rule run over one piece of a job. Rows is StoredRows where every tensor allows it.
template <class Rule, class T, class Rows>
class Loop {
public:
    Loop(const Job& job, const Piece& piece)
        : rule_(job.coefficients),
          piece_(piece),
          columns_(piece.last_column - piece.first_column),
          whole_(job.whole),
          positions_(job.positions),
          links_(job.links),
          negate_(job.negate),
          values_(job.values, piece),
          param_(job.param, piece),
          state_(make_state(job, piece, sequence())) {}

    void run() {
        if (whole_) return update_slot(0, 0, sequence());
        if (piece_.end == heavy_piece) {
            return update_slot(piece_.begin, positions_[piece_.begin], sequence());
        }
        int64_t ahead = piece_.begin;
        for (int64_t entry = piece_.begin; entry < piece_.end; ++entry) {
            const int64_t until = entry + prefetch_distance;
            for (; ahead < piece_.end && ahead <= until; ++ahead) prefetch_slot(ahead);
            if (!is_taken(entry)) update_slot(entry, positions_[entry], sequence());
        }
    }

private:
    static constexpr int states = Rule::states;
    static constexpr auto sequence() { return std::make_index_sequence<states>(); }

    struct State {
        Rows rows[states > 0 ? states : 1];
    };
    template <size_t... S>
    static State make_state(const Job& job, const Piece& piece, std::index_sequence<S...>) {
        return {{Rows(job.state[S], piece)...}};
    }

    bool is_taken(int64_t entry) const { return links_ && links_[entry] & taken; }
    Link next(int64_t entry) const { return links_ ? links_[entry] & ~taken : chain_end; }

    SPARSESTEP_INLINE void prefetch_slot(int64_t entry) const {
        if (is_taken(entry)) return;
        const int64_t slot = positions_[entry];
        values_.prefetch(entry);
        Link at = next(entry);
        for (int k = 0; k < prefetched_links && at != chain_end; ++k, at = next(at)) {
            values_.prefetch(at);
        }
        param_.prefetch(slot);
        for (int s = 0; s < states; ++s) state_.rows[s].prefetch(slot);
    }

    // The gradient of the slot that `entry` names first: the sum of its chain, or the stored row
    // itself where that is all.
    SPARSESTEP_INLINE const T* gradient(int64_t entry, int64_t offset, int64_t n) {
        const T* row = values_.load(entry, offset, n, sum_);
        const Link second = next(entry);
        if (second == chain_end && !negate_) return row;
        if (row != sum_) std::memcpy(sum_, row, size_t(n) * sizeof(T));
        Link ahead = second;
        for (int k = 0; k < prefetch_distance && ahead != chain_end; ++k) {
            values_.prefetch(ahead);
            ahead = next(ahead);
        }
        for (Link at = second; at != chain_end; at = next(at)) {
            if (ahead != chain_end) {
                values_.prefetch(ahead);
                ahead = next(ahead);
            }
            add(sum_, values_.load(at, offset, n, addend_), n);
        }
        if (negate_) {
            for (int64_t j = 0; j < n; ++j) sum_[j] = -sum_[j];
        }
        return sum_;
    }

    SPARSESTEP_INLINE static void add(T* __restrict sum, const T* __restrict row, int64_t n) {
        for (int64_t j = 0; j < n; ++j) sum[j] += row[j];
    }

    template <size_t... S>
    SPARSESTEP_INLINE void update_slot(int64_t entry, int64_t slot, std::index_sequence<S...>) {
        const int64_t columns = Rows::fixed_columns ? Rows::fixed_columns : columns_;
        for (int64_t offset = 0; offset < columns; offset += tile_size) {
            const int64_t rest = columns - offset;
            const int64_t n = rest < tile_size ? rest : tile_size;
            const T* grad = gradient(entry, offset, n);
            T* param = param_.load(slot, offset, n, param_tile_);
            T* state[] = {state_.rows[S].load(slot, offset, n, state_tiles_[S])..., nullptr};
            update(rule_, n, param, grad, state[S]...);
            param_.store(slot, offset, n, param);
            (state_.rows[S].store(slot, offset, n, state[S]), ...);
        }
    }

    template <class... Tile>
    SPARSESTEP_INLINE static void update(const Rule rule, int64_t n, T* __restrict param,
                                         const T* __restrict grad, Tile* __restrict... state) {
#pragma GCC ivdep
        for (int64_t j = 0; j < n; ++j) rule(param[j], grad[j], state[j]...);
    }

    const Rule rule_;
    const Piece piece_;
    const int64_t columns_;
    const bool whole_;
    const int64_t* const positions_;
    const Link* const links_;
    const bool negate_;
    const Rows values_, param_;
    const State state_;
    alignas(cache_line) T sum_[tile_size];
    alignas(cache_line) T addend_[tile_size];
    alignas(cache_line) T param_tile_[tile_size];
    alignas(cache_line) T state_tiles_[states > 0 ? states : 1][tile_size];
};

template <template <class> class Rule, class T, int64_t fixed>
void apply_stored(const Job& job, const Piece& piece) {
    Loop<Rule<T>, T, StoredRows<T, fixed>>(job, piece).run();
}

template <template <class> class Rule, class T>
void apply(const Job& job, const Piece& piece) {
    bool stored = is_stored_as<T>(job.values) && is_stored_as<T>(job.param);
    for (int s = 0; s < Rule<T>::states; ++s) stored &= is_stored_as<T>(job.state[s]);
    if (!stored) return Loop<Rule<T>, T, ConvertedRows<T>>(job, piece).run();
    switch (piece.last_column - piece.first_column) {
        case 16: return apply_stored<Rule, T, 16>(job, piece);
        case 32: return apply_stored<Rule, T, 32>(job, piece);
        case 64: return apply_stored<Rule, T, 64>(job, piece);
        case 128: return apply_stored<Rule, T, 128>(job, piece);
        default: return apply_stored<Rule, T, 0>(job, piece);
    }
}

template <template <class> class Rule>
constexpr RuleKernels kernels_of() {
    return {Rule<float>::name, Rule<float>::states, Rule<float>::coefficients, &apply<Rule, float>,
            &apply<Rule, double>};
}

}  // namespace
}  // namespace sparsestep
