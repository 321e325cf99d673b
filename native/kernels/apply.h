// The one loop: for each slot of the gradient, sum its entries' rows in order of appearance, then
// let the rule update parameter and state in place. One pass over memory, nothing the size of the
// gradient in between.
//
// Rows lie anywhere, those of the table and, where slots repeat, those of the gradient: all are
// asked for ahead of time.
//
// Internal linkage throughout: see types.h.
#pragma once

#include <type_traits>
#include <utility>

#include "core/types.h"
#include "kernels/constraint.h"
#include "kernels/grads.h"
#include "kernels/int8.h"
#include "kernels/masked.h"
#include "kernels/rows.h"
#include "rules/math.h"

namespace sparsestep {
namespace {

// A rule run over one slice of a job. Rows is DirectRows if every tensor allows it; StateRows
// differs if the state is stored differently.
template <class Rule, class T, class Rows, bool simple = false, class StateRows = Rows>
class ApplyLoop : GradReader<T, Rows, simple> {
public:
    ApplyLoop(const Job& job, const JobSlice& slice)
        : GradReader<T, Rows, simple>(job, slice),
          rule_(job.options, job.step),
          element_mask_(job.element_mask),
          packed_(job.packed),
          decay_factor_(T(job.decay_factor)),
          param_(job.param, job, slice, 0),
          state_(make_state(job, slice, sequence())) {}

    void run() {
        this->for_each_slot(
            state_.rows[0].is_spread(),
            [this](int64_t slot) SPARSESTEP_LAMBDA { prefetch_slot(slot); },
            [this](const SlotEntries& entries)
                SPARSESTEP_LAMBDA { update_slot(entries, sequence()); });
    }

private:
    using Base = GradReader<T, Rows, simple>;
    using Base::columns_, Base::gradient, Base::has_decay, Base::job_, Base::row_of;
    static constexpr int states = Rule::states;
    static constexpr int slot_states = Rule::slot_states;
    static constexpr auto sequence() { return std::make_index_sequence<states>(); }

    bool has_element_mask() const { return !simple && element_mask_; }
    bool is_constrained() const { return job_.constraint.norm > 0; }
    // Whether a converted row is rounded and stored only once it is constrained.
    bool keeps_param() const { return !Rows::is_direct && is_constrained(); }
    int64_t state_slot(int64_t slot) const {
        const bool is_rank = !simple && packed_.words && !job_.all_slots && !job_.expands_state;
        return is_rank ? rank_of(packed_, slot) : slot;
    }

    struct State {
        StateRows rows[states > 0 ? states : 1];
    };
    template <size_t... S>
    static State make_state(const Job& job, const JobSlice& slice, std::index_sequence<S...>) {
        if constexpr (states == 0)
            return {{StateRows(job.param, job, slice, 0)}};  // never used
        else
            return {{StateRows(job.state[S], job, slice, int(S) + 1)...}};
    }

    SPARSESTEP_INLINE void prefetch_slot(int64_t slot) const {
        param_.prefetch(slot);
        const int64_t place = state_slot(slot);
        for (int s = 0; s < states; ++s) state_.rows[s].prefetch(place);
        for (int s = 0; s < slot_states; ++s) {
            const TensorView& view = job_.slot_state[s];
            const int64_t byte = slot * view.slot_stride * bytes_of(view.dtype);
            __builtin_prefetch(static_cast<const char*>(view.data) + byte, 0, 2);
        }
    }

    template <size_t... S>
    SPARSESTEP_INLINE void update_slot(const SlotEntries& entries, std::index_sequence<S...>) {
        const int64_t slot = entries.slot;
        [[maybe_unused]] const int64_t place = state_slot(slot);
        const int64_t columns = Rows::fixed_columns ? Rows::fixed_columns : columns_;
        Rule rule = rule_;
        const T* known = nullptr;  // the gradient, where it was needed before and is one tile
        if constexpr (slot_states > 0) known = enter_slot(rule, entries, columns);
        for (int64_t offset = 0; offset < columns; offset += tile_size) {
            const int64_t rest = columns - offset;
            const int64_t n = rest < tile_size ? rest : tile_size;
            T* param = param_.load(slot, offset, n, param_tile_ + (keeps_param() ? offset : 0));
            const T* grad = known ? known : gradient(entries, offset, n, param);
            if (entries.next >= 0) param_.prefetch(this->slot_of(entries.next));
            T* state[] = {load_state<S>(entries, place, offset, n)..., nullptr};
            T* written[] = {param, state[S]...};
            if (has_element_mask()) keep_tiles(written, 1 + states, n, before_[0]);
            if (decay_factor_ != 1) multiply_tile(param, decay_factor_, n);
            update(rule, n, param, grad, state[S]...);
            if (entries.next >= 0) this->values_.prefetch(row_of(entries.next));
            if (has_element_mask()) {
                const bool* const element_mask =
                    element_mask_ + row_of(entries.first) * columns + offset;
                restore_tiles(written, 1 + states, n, before_[0], element_mask);
            }
            if (!keeps_param()) param_.store(slot, offset, n, param);
            (state_.rows[S].store(place, offset, n, state[S]), ...);
        }
        (state_.rows[S].finish(place, columns, state_tiles_[S]), ...);
        if (is_constrained()) constrain_slot(job_.constraint, param_, slot, columns, param_tile_);
    }

    template <size_t S>
    SPARSESTEP_INLINE T* load_state(const SlotEntries& entries, int64_t place, int64_t offset,
                                    int64_t n) {
        T* found = state_.rows[S].load(place, offset, n, state_tile(S, offset));
        if (entries.next >= 0) state_.rows[S].prefetch(this->slot_of(entries.next));
        return found;
    }

    // Where a slot's state is kept until its end, each tile has its place.
    SPARSESTEP_INLINE T* state_tile(size_t state, int64_t offset) {
        return state_tiles_[state] + (state_.rows[state].is_kept() ? offset : 0);
    }

    template <class... Tile>
    SPARSESTEP_INLINE static void update(const Rule rule, int64_t n, T* __restrict param,
                                         const T* __restrict grad, Tile* __restrict... state) {
        SPARSESTEP_IVDEP
        for (int64_t j = 0; j < n; ++j) rule(param[j], grad[j], state[j]...);
    }

    // Lets the rule read and write its state per slot.
    SPARSESTEP_INLINE const T* enter_slot(Rule& rule, const SlotEntries& entries, int64_t columns) {
        const int64_t slot = entries.slot;
        const T* known = nullptr;
        T mean_square = 0;
        if constexpr (Rule::wants_mean_square) {
            T lanes[row_lanes] = {};
            for (int64_t offset = 0; offset < columns; offset += tile_size) {
                const int64_t rest = columns - offset;
                const int64_t n = rest < tile_size ? rest : tile_size;
                const T* param = has_decay() ? param_.load(slot, offset, n, param_tile_) : nullptr;
                known = gradient(entries, offset, n, param);
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
    const bool* const element_mask_;
    const PackedMask packed_;
    const T decay_factor_;
    const Rows param_;
    const State state_;
    alignas(cache_line) T param_tile_[Rows::is_direct ? tile_size : max_kept_slot_size];
    alignas(cache_line) T state_tiles_[states > 0 ? states : 1][StateRows::kept_columns];
    T before_[1 + states][tile_size];
};

template <template <class> class Rule, class T, int64_t fixed>
void apply_direct(const Job& job, const JobSlice& slice) {
    if constexpr (fixed > 0) {
        if (is_simple_grad(job)) {
            return ApplyLoop<Rule<T>, T, DirectRows<T, fixed>, true>(job, slice).run();
        }
    }
    ApplyLoop<Rule<T>, T, DirectRows<T, fixed>>(job, slice).run();
}

template <template <class> class Rule, class T, int64_t fixed = 0>
void apply_int8(const Job& job, const JobSlice& slice) {
#ifndef SPARSESTEP_FEW_KERNELS
    if constexpr (fixed == 0) {
        switch (is_simple_grad(job) ? job.slot_size : 0) {
            case 32: return apply_int8<Rule, T, 32>(job, slice);
            case 64: return apply_int8<Rule, T, 64>(job, slice);
            case 128: return apply_int8<Rule, T, 128>(job, slice);
        }
    }
#endif
    ApplyLoop<Rule<T>, T, DirectRows<T, fixed>, (fixed > 0), Int8Rows<T, fixed>>(job, slice).run();
}

// Chooses the loop. Every instantiation costs compile time for each rule and instruction set:
// common row sizes have their own, tiles serve the rest.
template <template <class> class Rule, class T>
void apply(const Job& job, const JobSlice& slice) {
    if (slice.first_column == slice.last_column) return;  // slots without elements
    bool stored = is_stored_as<T>(job.values) && is_stored_as<T>(job.param) && !job.expands_state;
    if constexpr (Rule<T>::states > 0) {
        if (job.has_int8_state) {
            if constexpr (sizeof(T) == 4 && Rule<T>::has_fixed_sizes) {
                if (stored) return apply_int8<Rule, T>(job, slice);
            }
            stored = false;
        }
    }
    bool is_state_stored = true;
    for (int s = 0; s < Rule<T>::states; ++s) is_state_stored &= is_stored_as<T>(job.state[s]);
    if constexpr (Rule<T>::slot_states == 0) {
        if (job.packed.words && job.all_slots) {
            using Kept = MaskedRows<T>;
            if (is_state_stored) {
                return ApplyLoop<Rule<T>, T, Kept, false, DirectRows<T, 0>>(job, slice).run();
            }
            return ApplyLoop<Rule<T>, T, Kept, false, AnyRows<T>>(job, slice).run();
        }
    }
    stored = stored && is_state_stored;
    if (!stored)
        return ApplyLoop<Rule<T>, T, ConvertedRows<T>, false, AnyRows<T>>(job, slice).run();
    if constexpr (sizeof(T) == 4 && Rule<T>::has_fixed_sizes) {
        switch (slice.last_column - slice.first_column) {
            case 16: return apply_direct<Rule, T, 16>(job, slice);
#ifndef SPARSESTEP_FEW_KERNELS
            case 1: return apply_direct<Rule, T, 1>(job, slice);  // elements of their own
            case 32: return apply_direct<Rule, T, 32>(job, slice);
            case 64: return apply_direct<Rule, T, 64>(job, slice);
            case 128: return apply_direct<Rule, T, 128>(job, slice);
#endif
        }
    }
    return apply_direct<Rule, T, 0>(job, slice);
}

}  // namespace
}  // namespace sparsestep
