// The one loop: for each slot that was touched, sum its gradient rows in order of appearance, then
// let the rule update parameter and state in place. One pass over memory, nothing the size of the
// gradient in between.
//
// Rows lie anywhere, those of the table and, where slots repeat, those of the gradient: all are
// asked for ahead of time.
//
// Included by kernels.cpp alone; everything has internal linkage (see types.h for the reason).
#pragma once

#include <type_traits>
#include <utility>

#include "core/types.h"
#include "kernels/grads.h"
#include "kernels/int8.h"
#include "kernels/rows.h"
#include "rules/math.h"

namespace sparsestep {
namespace {

// A rule run over one piece of a job. Rows is StoredRows where every tensor allows it; StateRows is
// another where the state is stored in another way.
template <class Rule, class T, class Rows, bool plain = false, class StateRows = Rows>
class Loop : Gradients<T, Rows, plain> {
public:
    Loop(const Job& job, const Piece& piece)
        : Gradients<T, Rows, plain>(job, piece),
          rule_(job.options, job.step),
          held_(job.held),
          shrink_(T(job.shrink)),
          param_(job.param, job, piece, 0),
          state_(make_state(job, piece, sequence())) {}

    void run() {
        this->for_each_slot(
            state_.rows[0].is_spread(),
            [this](int64_t slot) SPARSESTEP_LAMBDA { prefetch_slot(slot); },
            [this](const Touch& touch) SPARSESTEP_LAMBDA { update_slot(touch, sequence()); });
    }

private:
    using Base = Gradients<T, Rows, plain>;
    using Base::columns_, Base::gradient, Base::has_decay, Base::job_, Base::row_of;
    static constexpr int states = Rule::states;
    static constexpr int slot_states = Rule::slot_states;
    static constexpr auto sequence() { return std::make_index_sequence<states>(); }

    bool is_held_in_part() const { return !plain && held_; }

    struct State {
        StateRows rows[states > 0 ? states : 1];
    };
    template <size_t... S>
    static State make_state(const Job& job, const Piece& piece, std::index_sequence<S...>) {
        if constexpr (states == 0)
            return {{StateRows(job.param, job, piece, 0)}};  // never used
        else
            return {{StateRows(job.state[S], job, piece, int(S) + 1)...}};
    }

    SPARSESTEP_INLINE void prefetch_slot(int64_t slot) const {
        param_.prefetch(slot);
        for (int s = 0; s < states; ++s) state_.rows[s].prefetch(slot);
        for (int s = 0; s < slot_states; ++s) {
            const View& view = job_.slot_state[s];
            const int64_t byte = slot * view.slot_stride * bytes_of(view.dtype);
            __builtin_prefetch(static_cast<const char*>(view.data) + byte, 0, 2);
        }
    }

    template <size_t... S>
    SPARSESTEP_INLINE void update_slot(const Touch& touch, std::index_sequence<S...>) {
        const int64_t slot = touch.slot;
        const int64_t columns = Rows::fixed_columns ? Rows::fixed_columns : columns_;
        Rule rule = rule_;
        const T* known = nullptr;  // the gradient, where it was needed before and is one tile
        if constexpr (slot_states > 0) known = enter_slot(rule, touch, columns);
        for (int64_t offset = 0; offset < columns; offset += tile_size) {
            const int64_t rest = columns - offset;
            const int64_t n = rest < tile_size ? rest : tile_size;
            T* param = param_.load(slot, offset, n, param_tile_);
            const T* grad = known ? known : gradient(touch, offset, n, param);
            if (touch.next >= 0) param_.prefetch(this->slot_of(touch.next));
            T* state[] = {load_state<S>(touch, offset, n)..., nullptr};
            T* written[] = {param, state[S]...};
            if (is_held_in_part()) keep_tiles(written, 1 + states, n, before_[0]);
            if (shrink_ != 1) multiply_tile(param, shrink_, n);
            update(rule, n, param, grad, state[S]...);
            if (touch.next >= 0) this->values_.prefetch(row_of(touch.next));
            if (is_held_in_part()) {
                const bool* const held = held_ + row_of(touch.first) * columns + offset;
                restore_tiles(written, 1 + states, n, before_[0], held);
            }
            param_.store(slot, offset, n, param);
            (state_.rows[S].store(slot, offset, n, state[S]), ...);
        }
        (state_.rows[S].finish(slot, columns, state_tiles_[S]), ...);
    }

    template <size_t S>
    SPARSESTEP_INLINE T* load_state(const Touch& touch, int64_t offset, int64_t n) {
        T* found = state_.rows[S].load(touch.slot, offset, n, state_tile(S, offset));
        if (touch.next >= 0) state_.rows[S].prefetch(this->slot_of(touch.next));
        return found;
    }

    // Where a slot's state is kept until its end, each tile has its place.
    T* state_tile(size_t state, int64_t offset) {
        return state_tiles_[state] + (state_.rows[state].is_kept() ? offset : 0);
    }

    template <class... Tile>
    SPARSESTEP_INLINE static void update(const Rule rule, int64_t n, T* __restrict param,
                                         const T* __restrict grad, Tile* __restrict... state) {
        SPARSESTEP_IVDEP
        for (int64_t j = 0; j < n; ++j) rule(param[j], grad[j], state[j]...);
    }

    // Lets the rule read and write what it keeps once per slot.
    SPARSESTEP_INLINE const T* enter_slot(Rule& rule, const Touch& touch, int64_t columns) {
        const int64_t slot = touch.slot;
        const T* known = nullptr;
        T mean_square = 0;
        if constexpr (Rule::wants_mean_square) {
            T lanes[row_lanes] = {};
            for (int64_t offset = 0; offset < columns; offset += tile_size) {
                const int64_t rest = columns - offset;
                const int64_t n = rest < tile_size ? rest : tile_size;
                const T* param = has_decay() ? param_.load(slot, offset, n, param_tile_) : nullptr;
                known = gradient(touch, offset, n, param);
                add_squares(lanes, known, n);
            }
            if (columns > tile_size) known = nullptr;
            const T sum = fold(lanes, [](T a, T b) SPARSESTEP_LAMBDA { return a + b; });
            mean_square = sum / T(columns);
        }
        T row_state[slot_states] = {};
        for (int s = 0; s < slot_states; ++s) {
            row_state[s] = load_number<T>(job_.slot_state[s], slot);
        }
        rule.enter_slot(row_state, mean_square);
        for (int s = 0; s < slot_states; ++s) {
            store_number(job_.slot_state[s], slot, row_state[s], job_, states + 1 + s);
        }
        return known;
    }

    SPARSESTEP_INLINE static void add_squares(T* __restrict lanes, const T* __restrict grad,
                                              int64_t n) {
        int64_t j = 0;
        for (; j + row_lanes <= n; j += row_lanes) {
            for (int lane = 0; lane < row_lanes; ++lane) {
                lanes[lane] += grad[j + lane] * grad[j + lane];
            }
        }
        for (int lane = 0; j < n; ++j, ++lane) lanes[lane] += grad[j] * grad[j];
    }

    const Rule rule_;
    const bool* const held_;
    const T shrink_;
    const Rows param_;
    const State state_;
    alignas(cache_line) T param_tile_[tile_size];
    alignas(cache_line) T state_tiles_[states > 0 ? states : 1][StateRows::kept_columns];
    T before_[1 + states][tile_size];
};

template <template <class> class Rule, class T, int64_t fixed>
void apply_stored(const Job& job, const Piece& piece) {
    if constexpr (fixed > 0) {
        if (is_plain(job)) {
            return Loop<Rule<T>, T, StoredRows<T, fixed>, true>(job, piece).run();
        }
    }
    Loop<Rule<T>, T, StoredRows<T, fixed>>(job, piece).run();
}

template <template <class> class Rule, class T, int64_t fixed = 0>
void apply_coded(const Job& job, const Piece& piece) {
#ifndef SPARSESTEP_FEW_KERNELS
    if constexpr (fixed == 0) {
        switch (job.block) {
            case 32: return apply_coded<Rule, T, 32>(job, piece);
            case 64: return apply_coded<Rule, T, 64>(job, piece);
            case 128: return apply_coded<Rule, T, 128>(job, piece);
        }
    }
#endif
    Loop<Rule<T>, T, StoredRows<T, fixed>, true, CodedRows<T, fixed>>(job, piece).run();
}

// Which loop runs. Each takes the compiler a second for every rule and instruction set, so there
// are many for what is usual and one for the rest: rows in tiles serve all that there is.
template <template <class> class Rule, class T>
void apply(const Job& job, const Piece& piece) {
    if (piece.first_column == piece.last_column) return;  // slots without elements
    bool stored = is_stored_as<T>(job.values) && is_stored_as<T>(job.param);
    if constexpr (Rule<T>::states > 0) {
        if (job.coded) {
            if constexpr (sizeof(T) == 4 && Rule<T>::is_usual) {
                if (stored && is_plain(job)) return apply_coded<Rule, T>(job, piece);
            }
            stored = false;
        }
    }
    for (int s = 0; s < Rule<T>::states; ++s) stored = stored && is_stored_as<T>(job.state[s]);
    if (!stored) return Loop<Rule<T>, T, ConvertedRows<T>, false, AnyRows<T>>(job, piece).run();
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
