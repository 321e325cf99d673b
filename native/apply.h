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

// How many entries ahead rows are asked for: long enough to hide a trip to memory. Rows of a single
// cache line are done with so soon that it takes more of them.
constexpr int64_t prefetch_distance = 16;
constexpr int64_t prefetch_distance_narrow = 64;

// How many further entries of a chain are asked for together with its first; a longer one is asked
// for while it is summed.
constexpr int prefetched_links = 4;

// The hardware itself goes on with a row that is longer than this.
constexpr int64_t prefetch_bytes = 1024;

// Always inlined: GCC takes a function that does nothing but prefetch for one without effect and
// drops the calls.
#define SPARSESTEP_INLINE inline __attribute__((always_inline))
#define SPARSESTEP_LAMBDA __attribute__((always_inline))

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

    StoredRows(const View& view, const Job&, const Piece& piece, int)
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
        constexpr int64_t fixed_lines = (fixed * int64_t(sizeof(T)) + cache_line - 1) / cache_line;
        const int64_t count = fixed ? fixed_lines : lines;
        for (int64_t line = 0; line < count; ++line) {
            __builtin_prefetch(at + line * cache_line, 0, 2);
        }
    }
};

template <class T>
struct ConvertedRows {
    static constexpr int64_t fixed_columns = 0;
    View view;
    int64_t first_column, last_column, block;
    bool stochastic;
    Randomness random;

    ConvertedRows(const View& view, const Job& job, const Piece& piece, int tensor)
        : view(view),
          first_column(piece.first_column),
          last_column(piece.last_column),
          block(job.block),
          stochastic(job.stochastic),
          random(job.seed, tensor) {}
    T* load(int64_t row, int64_t offset, int64_t n, T* tile) const {
        load_tile(view, row, first_column + offset, n, tile);
        return tile;
    }
    void store(int64_t row, int64_t offset, int64_t n, const T* tile) const {
        const int64_t column = first_column + offset;
        if (stochastic) {
            store_tile(view, row, column, n, tile, random, row * block + column);
        } else {
            store_tile(view, row, column, n, tile);
        }
    }
    SPARSESTEP_INLINE void prefetch(int64_t row) const {
        const int64_t size = bytes_of(view.dtype);
        const char* at =
            static_cast<const char*>(view.data) + element_offset(view, row, first_column) * size;
        const int64_t bytes = (last_column - first_column) * view.element_stride * size;
        const int64_t end = bytes < prefetch_bytes ? bytes : prefetch_bytes;
        for (int64_t byte = 0; byte < end; byte += cache_line) {
            __builtin_prefetch(at + byte, 0, 2);
        }
    }
};

// The gradients of a piece's slots: for each the sum of its entries' rows.
template <class T, class Rows>
class Gradients {
protected:
    Gradients(const Job& job, const Piece& piece)
        : job_(job),
          piece_(piece),
          columns_(piece.last_column - piece.first_column),
          whole_(job.whole),
          positions_(job.positions),
          source_(job.source),
          links_(job.links),
          negate_(job.negate),
          l2_(T(job.l2)),
          scale_(job.scale),
          values_(job.values, job, piece, -1) {}

    int64_t slot_of(int64_t entry) const { return whole_ ? entry : positions_[entry]; }
    int64_t row_of(int64_t entry) const { return source_ ? source_[entry] : entry; }
    bool is_taken(int64_t entry) const { return links_ && links_[entry] & taken; }
    Link next(int64_t entry) const { return links_ ? links_[entry] & ~taken : chain_end; }

    // Calls prefetch(entry) ahead of time and visit(entry) for every entry that is the first of its
    // slot.
    template <class Prefetch, class Visit>
    SPARSESTEP_INLINE void for_each_slot(const Prefetch& prefetch, const Visit& visit) const {
        const bool heavy = piece_.end == heavy_piece;
        const int64_t end = heavy ? piece_.begin + 1 : piece_.end;
        const bool narrow = columns_ * int64_t(sizeof(T)) <= cache_line;
        const int64_t distance = narrow ? prefetch_distance_narrow : prefetch_distance;
        int64_t ahead = piece_.begin;
        for (int64_t entry = piece_.begin; entry < end; ++entry) {
            const int64_t until = entry + distance;
            for (; ahead < end && ahead <= until; ++ahead) {
                if (!is_taken(ahead)) prefetch(ahead);
            }
            if (heavy || !is_taken(entry)) visit(entry);
        }
    }

    SPARSESTEP_INLINE void prefetch_values(int64_t entry) const {
        values_.prefetch(row_of(entry));
        Link at = next(entry);
        for (int k = 0; k < prefetched_links && at != chain_end; ++k, at = next(at)) {
            values_.prefetch(row_of(at));
        }
    }

    // The gradient of the slot that `entry` names first: the sum of its chain, or the stored row
    // itself where that is all. With maximize its sign is turned, with coupled decay a part of the
    // parameter is added.
    SPARSESTEP_INLINE const T* gradient(int64_t entry, int64_t offset, int64_t n, const T* param) {
        const T* row = values_.load(row_of(entry), offset, n, sum_);
        const Link second = next(entry);
        if (scale_.data) {
            multiply(entry, row, sum_, n);
        } else {
            if (second == chain_end && !negate_ && l2_ == 0) return row;
            if (row != sum_) std::memcpy(sum_, row, size_t(n) * sizeof(T));
        }
        Link ahead = second;
        for (int k = 0; k < prefetch_distance && ahead != chain_end; ++k) {
            values_.prefetch(row_of(ahead));
            ahead = next(ahead);
        }
        for (Link at = second; at != chain_end; at = next(at)) {
            if (ahead != chain_end) {
                values_.prefetch(row_of(ahead));
                ahead = next(ahead);
            }
            const T* addend = values_.load(row_of(at), offset, n, addend_);
            if (scale_.data) {
                multiply(at, addend, addend_, n);
                addend = addend_;
            }
            add(sum_, addend, n);
        }
        if (negate_) {
            for (int64_t j = 0; j < n; ++j) sum_[j] = -sum_[j];
        }
        if (l2_ != 0) {
            for (int64_t j = 0; j < n; ++j) sum_[j] += l2_ * param[j];
        }
        return sum_;
    }

    // A row times its factor. A product is rounded to the precision of the values: it is then what
    // it would be, had the rows been written out.
    void multiply(int64_t entry, const T* row, T* product, int64_t n) const {
        T factor;
        load_tile(scale_, entry, 0, 1, &factor);
        for (int64_t j = 0; j < n; ++j) product[j] = factor * row[j];
        if (job_.values.dtype != dtype_of<T>) round_tile(job_.values.dtype, n, product);
    }

    SPARSESTEP_INLINE static void add(T* __restrict sum, const T* __restrict row, int64_t n) {
        for (int64_t j = 0; j < n; ++j) sum[j] += row[j];
    }

    const Job& job_;
    const Piece piece_;
    const int64_t columns_;
    const bool whole_;
    const int64_t* const positions_;
    const int64_t* const source_;
    const Link* const links_;
    const bool negate_;
    const T l2_;
    const View scale_;
    const Rows values_;
    alignas(cache_line) T sum_[tile_size];
    alignas(cache_line) T addend_[tile_size];
};

// A rule run over one piece of a job. Rows is StoredRows where every tensor allows it.
template <class Rule, class T, class Rows>
class Loop : Gradients<T, Rows> {
public:
    Loop(const Job& job, const Piece& piece)
        : Gradients<T, Rows>(job, piece),
          rule_(job.coefficients),
          held_(job.held),
          shrink_(T(job.shrink)),
          param_(job.param, job, piece, 0),
          state_(make_state(job, piece, sequence())) {}

    void run() {
        this->for_each_slot([this](int64_t entry) SPARSESTEP_LAMBDA { prefetch_slot(entry); },
                            [this](int64_t entry) SPARSESTEP_LAMBDA {
                                update_slot(entry, slot_of(entry), sequence());
                            });
    }

private:
    using Base = Gradients<T, Rows>;
    using Base::columns_, Base::gradient, Base::job_, Base::l2_, Base::prefetch_values;
    using Base::row_of, Base::slot_of;
    static constexpr int states = Rule::states;
    static constexpr int slot_states = Rule::slot_states;
    static constexpr auto sequence() { return std::make_index_sequence<states>(); }

    struct State {
        Rows rows[states > 0 ? states : 1];
    };
    template <size_t... S>
    static State make_state(const Job& job, const Piece& piece, std::index_sequence<S...>) {
        if constexpr (states == 0)
            return {{Rows(job.param, job, piece, 0)}};  // never used
        else
            return {{Rows(job.state[S], job, piece, int(S) + 1)...}};
    }

    SPARSESTEP_INLINE void prefetch_slot(int64_t entry) const {
        const int64_t slot = slot_of(entry);
        prefetch_values(entry);
        param_.prefetch(slot);
        for (int s = 0; s < states; ++s) state_.rows[s].prefetch(slot);
        for (int s = 0; s < slot_states; ++s) {
            const View& view = job_.slot_state[s];
            const int64_t byte = slot * view.slot_stride * bytes_of(view.dtype);
            __builtin_prefetch(static_cast<const char*>(view.data) + byte, 0, 2);
        }
    }

    template <size_t... S>
    SPARSESTEP_INLINE void update_slot(int64_t entry, int64_t slot, std::index_sequence<S...>) {
        const int64_t columns = Rows::fixed_columns ? Rows::fixed_columns : columns_;
        Rule rule = rule_;
        const T* known = nullptr;  // the gradient, where it was needed before and is one tile
        if constexpr (slot_states > 0) known = enter_slot(rule, entry, slot, columns);
        for (int64_t offset = 0; offset < columns; offset += tile_size) {
            const int64_t rest = columns - offset;
            const int64_t n = rest < tile_size ? rest : tile_size;
            T* param = param_.load(slot, offset, n, param_tile_);
            const T* grad = known ? known : gradient(entry, offset, n, param);
            T* state[] = {state_.rows[S].load(slot, offset, n, state_tiles_[S])..., nullptr};
            T* written[] = {param, state[S]...};
            if (held_) keep(written, n);
            if (shrink_ != 1) {
                for (int64_t j = 0; j < n; ++j) param[j] *= shrink_;
            }
            update(rule, n, param, grad, state[S]...);
            if (held_) restore(written, row_of(entry) * columns + offset, n);
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

    // Of a slot that is held in part, what is not held gets back what it had.
    void keep(T* const* written, int64_t n) {
        for (int t = 0; t <= states; ++t)
            std::memcpy(before_[t], written[t], size_t(n) * sizeof(T));
    }
    void restore(T* const* written, int64_t first, int64_t n) const {
        for (int t = 0; t <= states; ++t) {
            for (int64_t j = 0; j < n; ++j) {
                written[t][j] = held_[first + j] ? written[t][j] : before_[t][j];
            }
        }
    }

    // Lets the rule read and write what it keeps once per slot.
    SPARSESTEP_INLINE const T* enter_slot(Rule& rule, int64_t entry, int64_t slot,
                                          int64_t columns) {
        const T* known = nullptr;
        T mean_square = 0;
        if constexpr (Rule::wants_mean_square) {
            T lanes[mean_lanes] = {};
            for (int64_t offset = 0; offset < columns; offset += tile_size) {
                const int64_t rest = columns - offset;
                const int64_t n = rest < tile_size ? rest : tile_size;
                const T* param = l2_ != 0 ? param_.load(slot, offset, n, param_tile_) : nullptr;
                known = gradient(entry, offset, n, param);
                add_squares(lanes, known, n);
            }
            if (columns > tile_size) known = nullptr;
            mean_square = total(lanes) / T(columns);
        }
        T kept[slot_states] = {};
        for (int s = 0; s < slot_states; ++s) load_tile(job_.slot_state[s], slot, 0, 1, kept + s);
        rule.enter_slot(kept, mean_square);
        for (int s = 0; s < slot_states; ++s) {
            if (job_.stochastic) {
                const Randomness random(job_.seed, states + 1 + s);
                store_tile(job_.slot_state[s], slot, 0, 1, kept + s, random, slot);
            } else {
                store_tile(job_.slot_state[s], slot, 0, 1, kept + s);
            }
        }
        return known;
    }

    // Squares are summed in as many lanes as the widest vector has, on every machine: the order of
    // a sum decides its last bits.
    static constexpr int mean_lanes = 16;

    SPARSESTEP_INLINE static void add_squares(T* __restrict lanes, const T* __restrict grad,
                                              int64_t n) {
        int64_t j = 0;
        for (; j + mean_lanes <= n; j += mean_lanes) {
            for (int lane = 0; lane < mean_lanes; ++lane) {
                lanes[lane] += grad[j + lane] * grad[j + lane];
            }
        }
        for (int lane = 0; j < n; ++j, ++lane) lanes[lane] += grad[j] * grad[j];
    }
    SPARSESTEP_INLINE static T total(T* lanes) {
        for (int half = mean_lanes / 2; half > 0; half /= 2) {
            for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
        }
        return lanes[0];
    }

    const Rule rule_;
    const bool* const held_;
    const T shrink_;
    const Rows param_;
    const State state_;
    alignas(cache_line) T param_tile_[tile_size];
    alignas(cache_line) T state_tiles_[states > 0 ? states : 1][tile_size];
    T before_[1 + states][tile_size];
};

template <template <class> class Rule, class T, int64_t fixed>
void apply_stored(const Job& job, const Piece& piece) {
    Loop<Rule<T>, T, StoredRows<T, fixed>>(job, piece).run();
}

template <template <class> class Rule, class T>
void apply(const Job& job, const Piece& piece) {
    if (piece.first_column == piece.last_column) return;  // slots without elements
    bool stored = is_stored_as<T>(job.values) && is_stored_as<T>(job.param);
    for (int s = 0; s < Rule<T>::states; ++s) stored &= is_stored_as<T>(job.state[s]);
    if (!stored) return Loop<Rule<T>, T, ConvertedRows<T>>(job, piece).run();
    if constexpr (sizeof(T) == 4 && Rule<T>::is_usual) {
        switch (piece.last_column - piece.first_column) {
            case 16: return apply_stored<Rule, T, 16>(job, piece);
#ifndef SPARSESTEP_FEW_KERNELS
            case 1: return apply_stored<Rule, T, 1>(job, piece);  // elements of their own
            case 32: return apply_stored<Rule, T, 32>(job, piece);
            case 64: return apply_stored<Rule, T, 64>(job, piece);
            case 128: return apply_stored<Rule, T, 128>(job, piece);
#endif
        }
    }
    return apply_stored<Rule, T, 0>(job, piece);
}

}  // namespace
}  // namespace sparsestep
