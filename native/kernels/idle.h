// Dense semantics: idle rows catch up with the steps that they missed. Each idle update is a class,
// the twin of the class in src/sparsestep/rules/idle.py; the list of all idle updates is at the
// end.
//
// Internal linkage throughout: see types.h.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/types.h"
#include "kernels/constraint.h"
#include "kernels/grads.h"
#include "kernels/rows.h"
#include "rules/ftrl.h"
#include "rules/math.h"

namespace sparsestep {
namespace {

// The steps that a row missed, all but `since` of those up to `now`, counted from the history's
// base.
struct Missed {
    int64_t since, now;
    bool had_gradient;  // at any time, so that there is something to move along
    double row_square;  // where the square is one number for the whole row
};

// To count in a loop over T, as wide as T so that the loop is vectorized.
template <class T>
using Counter = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

// Base of idle updates. Each has the `name` of its Python twin, and in addition:
//
//   enter_row(missed)         looks up what the row needs
//   move(param, state, m)     moves a tile; returns whether the parameter is seen to have moved
//   is_stale(moved)           whether the row was not where it should have been
template <class T>
class IdleUpdate {
public:
    explicit IdleUpdate(const CatchUpJob& work) : job_(work) {}

    void enter_row(const Missed& missed) {
        missed_ = missed;
        decay_ = T(job_.inverse_decay[missed.since] / latest() - 1);
    }

    // Multiplies state number `s` by a factor. Close to one, the difference to one has the more
    // exact digits.
    void decay(int, T* __restrict state, double factor, int64_t m) const {
        if (factor > 0.5) {
            const T more = T(factor - 1);
            for (int64_t j = 0; j < m; ++j) state[j] += state[j] * more;
        } else {
            const T whole = T(factor);
            for (int64_t j = 0; j < m; ++j) state[j] *= whole;
        }
    }

protected:
    double latest() const { return job_.inverse_decay[missed_.now]; }
    bool has_decayed() const { return job_.inverse_decay[missed_.since] != latest(); }

    // Over all steps since, times latest().
    const double* sums() const { return job_.sums + missed_.since * job_.sums_per_step; }
    bool has_sums() const { return job_.converges && missed_.now == job_.now - job_.base; }
    bool has_moved_by_sums() const {
        return missed_.had_gradient && (!has_sums() || sums()[0] != 0);
    }

    // Of the sizes, over the steps up to `end`.
    double total_size(int64_t end) const {
        return (job_.sums[end] - job_.sums[missed_.since]) / latest();
    }
    bool has_total() const { return job_.sums[missed_.now] != job_.sums[missed_.since]; }

    // The sum of move(size, step) over the missed steps, one by one, within the horizon. The size
    // is that of the step times the decay of the buffer up to it.
    template <class Move>
    double replay(Move move) const {
        const int64_t most = missed_.since + job_.horizon;
        const int64_t end = missed_.now < most ? missed_.now : most;
        double total = 0, left = 1;
        for (int64_t step = missed_.since + 1; step <= end; ++step) {
            left *= job_.buffer_decay;
            total += move(job_.sizes[step] * job_.inverse_decay[step] * left, step);
        }
        return total / latest();
    }

    const CatchUpJob& job_;
    Missed missed_{};
    T decay_{};  // the factor of weight decay, minus one
};

// Weight decay is all that changes the parameter.
template <class T>
class Still : public IdleUpdate<T> {
public:
    static constexpr const char* name = "still";
    using IdleUpdate<T>::IdleUpdate;

    bool move(T* __restrict param, T* const*, int64_t m) const {
        const T decay = this->decay_;
        for (int64_t j = 0; j < m; ++j) param[j] += param[j] * decay;
        return false;
    }
    bool is_stale(bool) const { return this->has_decayed(); }
};

// Along a buffer that decays: a geometric series.
template <class T>
class Geometric : public IdleUpdate<T> {
public:
    static constexpr const char* name = "geometric";
    using IdleUpdate<T>::IdleUpdate;

    void enter_row(const Missed& missed) {
        IdleUpdate<T>::enter_row(missed);
        total_ = this->has_sums() ? T(this->sums()[0] / this->latest())
                                  : T(this->replay([](double size, int64_t) { return size; }));
    }
    bool move(T* __restrict param, T* const* state, int64_t m) const {
        const T* __restrict buffer = state[this->job_.buffer];
        const T decay = this->decay_, total = total_;
        for (int64_t j = 0; j < m; ++j) param[j] += param[j] * decay - buffer[j] * total;
        return false;
    }
    bool is_stale(bool) const { return this->has_decayed() || this->has_moved_by_sums(); }

private:
    T total_{};
};

// What a buffer whose sign counts never becomes smaller than.
inline double least_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::float16: return 0x1p-24;
        case Dtype::float64: return 0x1p-1022;
        default: return 0x1p-126;
    }
}

// Along the sign of a buffer that decays but keeps its sign.
template <class T>
class SignDrift : public IdleUpdate<T> {
public:
    static constexpr const char* name = "sign_drift";
    using IdleUpdate<T>::IdleUpdate;

    void enter_row(const Missed& missed) {
        IdleUpdate<T>::enter_row(missed);
        // A buffer that is gone after one step has no sign from then on.
        drift_ = T(this->total_size(keeps_sign() ? missed.now : missed.since + 1));
    }
    bool move(T* __restrict param, T* const* state, int64_t m) const {
        const T* __restrict buffer = state[this->job_.buffer];
        const T decay = this->decay_, drift = drift_;
        for (int64_t j = 0; j < m; ++j) param[j] += param[j] * decay - sign(buffer[j]) * drift;
        return false;
    }
    void decay(int s, T* __restrict state, double factor, int64_t m) const {
        if (s != this->job_.buffer || !keeps_sign()) {
            IdleUpdate<T>::decay(s, state, factor, m);
            return;
        }
        const T whole = T(factor), least = T(least_of(this->job_.state[s].dtype));
        for (int64_t j = 0; j < m; ++j) {
            const T decayed = state[j] * whole;
            state[j] = absolute(decayed) < least ? sign(state[j]) * least : decayed;
        }
    }
    bool is_stale(bool) const {
        return this->has_decayed() || (this->missed_.had_gradient && this->has_total());
    }

private:
    bool keeps_sign() const { return this->job_.buffer_decay > 0; }

    T drift_{};
};

// Adam's: a buffer divided by the root of a square, where both decay. A Chebyshev series in
// eps / (root * center + eps), or one step after the other where that is not exact enough.
template <class T>
class Quotient : public IdleUpdate<T> {
public:
    static constexpr const char* name = "quotient";

    explicit Quotient(const CatchUpJob& work)
        : IdleUpdate<T>(work), root_decay_(square_root(work.square_decay)) {}

    void enter_row(const Missed& missed) {
        IdleUpdate<T>::enter_row(missed);
        const double* sums = this->sums();
        const double allowed = this->job_.max_error * absolute(sums[0]);
        double error = sums[series_terms];
        terms_ = 0;
        if (!this->has_sums() || !(error <= allowed)) return;
        // Half as many terms are enough for most rows, or a quarter.
        for (terms_ = series_terms; terms_ > series_terms / 4; terms_ /= 2) {
            for (int i = terms_ / 2; i < terms_; ++i) error += absolute(sums[i]);
            if (!(error <= allowed)) break;
        }
        for (int i = 0; i < terms_; ++i) series_[i] = T(sums[i] / this->latest());
        center_ = T(this->job_.centers[missed.since]);
    }
    bool move(T* param, T* const* state, int64_t m) const {
        const T* buffer = state[this->job_.buffer];
        switch (terms_) {
            case series_terms: move_by_series<series_terms>(param, buffer, state, m); break;
            case series_terms / 2: move_by_series<series_terms / 2>(param, buffer, state, m); break;
            case series_terms / 4: move_by_series<series_terms / 4>(param, buffer, state, m); break;
            default:
                if (has_squares() && this->missed_.now == this->missed_.since + 1) {
                    move_one_step(param, buffer, state[this->job_.square], m);
                } else {
                    replay_entries(param, buffer, state, m);
                }
        }
        return false;
    }
    bool is_stale(bool) const { return this->has_decayed() || this->has_moved_by_sums(); }

private:
    // Whether each entry has a square, and not the row.
    bool has_squares() const { return this->job_.square < this->job_.states; }

    template <int terms>
    void move_by_series(T* __restrict param, const T* __restrict buffer, T* const* state,
                        int64_t m) const {
        const Series<terms> series(*this);
        const T decay = this->decay_;
        if (has_squares()) {
            const T* __restrict square = state[this->job_.square];
            for (int64_t j = 0; j < m; ++j) {
                const T move = buffer[j] * series.at(square[j]);
                param[j] += param[j] * decay - (buffer[j] != 0 ? move : T(0));
            }
        } else {
            const T sum = series.at(T(this->missed_.row_square));
            for (int64_t j = 0; j < m; ++j) {
                const T move = buffer[j] * sum;
                param[j] += param[j] * decay - (buffer[j] != 0 ? move : T(0));
            }
        }
    }

    template <int terms>
    class Series {
    public:
        explicit Series(const Quotient& of) : eps_(T(of.job_.eps)), center_(of.center_) {
            for (int i = 0; i < terms; ++i) series_[i] = of.series_[i];
        }

        // The sum of the moves along a buffer of one; by Clenshaw's recurrence.
        SPARSESTEP_INLINE T at(T square) const {
            const T divisor = square_root(square) * center_ + eps_;
            const T inverse = 1 / divisor;
            const T twice_x = divisor > 0 ? 4 * (eps_ * inverse) - 2 : T(-2);
            return inverse * from<terms - 1>(twice_x, 0, 0);
        }

    private:
        // Recursive, since a loop in the loop over entries would not be vectorized.
        template <int i>
        SPARSESTEP_INLINE T from(T twice_x, T last, T before) const {
            if constexpr (i == 0) {
                return series_[0] + twice_x / 2 * last - before;
            } else {
                return from<i - 1>(twice_x, series_[i] + twice_x * last - before, last);
            }
        }

        const T eps_, center_;
        T series_[terms];
    };

    void move_one_step(T* __restrict param, const T* __restrict buffer, const T* __restrict square,
                       int64_t m) const {
        const int64_t step = this->missed_.now;
        const T decay = this->decay_, eps = T(this->job_.eps);
        const T size = T(this->job_.sizes[step] * this->job_.buffer_decay);
        const T root = T(root_decay_ / this->job_.roots[step]);
        for (int64_t j = 0; j < m; ++j) {
            const T move = size * buffer[j] / (square_root(square[j]) * root + eps);
            param[j] += param[j] * decay - (buffer[j] != 0 ? move : T(0));
        }
    }

    void replay_entries(T* param, const T* buffer, T* const* state, int64_t m) const {
        const T* square = has_squares() ? state[this->job_.square] : nullptr;
        double sum = 0;
        bool has_sum = false;
        for (int64_t j = 0; j < m; ++j) {
            T move = 0;
            if (buffer[j] != 0) {
                if (square || !has_sum) {
                    sum = replay_entry(square ? double(square[j]) : this->missed_.row_square);
                    has_sum = true;
                }
                move = T(double(buffer[j]) * sum);
            }
            param[j] += param[j] * this->decay_ - move;
        }
    }

    double replay_entry(double square) const {
        const double root = square_root(square);
        double left = 1;
        return this->replay([&](double size, int64_t step) {
            left *= root_decay_;
            return size / (root * left / this->job_.roots[step] + this->job_.eps);
        });
    }

    const double root_decay_;
    int terms_{};  // zero: step by step
    T series_[series_terms];
    T center_{};
};

// The parameter is a function of its state, under a rule whose options may have changed.
template <class T, template <class> class Rule>
class Recompute : public IdleUpdate<T> {
public:
    static constexpr const char* name = Rule<T>::name;

    explicit Recompute(const CatchUpJob& work)
        : IdleUpdate<T>(work), rule_(work.options, double(work.now)) {}

    bool move(T* param, T* const* state, int64_t m) const {
        if (!this->has_total() || rule_.rests()) return false;
        return recompute(param, state, m, std::make_index_sequence<Rule<T>::states>());
    }
    bool is_stale(bool moved) const { return moved; }

private:
    template <size_t... S>
    bool recompute(T* param, T* const* state, int64_t m, std::index_sequence<S...>) const {
        return recompute(rule_, m, param, state[S]...);
    }

    // Returns whether it moves anything by more than a rounding, of bfloat16.
    template <class... State>
    static bool recompute(const Rule<T> rule, int64_t m, T* __restrict param,
                          const State* __restrict... state) {
        Counter<T> moved = 0;
        for (int64_t j = 0; j < m; ++j) {
            const T next = rule.recompute(state[j]...);
            moved += absolute(next - param[j]) > absolute(next) / 256;
            param[j] = next;
        }
        return moved != 0;
    }

    const Rule<T> rule_;
};

template <class T>
using RecomputeFtrl = Recompute<T, Ftrl>;

template <class T, class IdleUpdate, class Rows>
class CatchUpLoop {
public:
    CatchUpLoop(const CatchUpJob& work, const Job& job, const JobSlice& whole)
        : job_(work),
          update_(work),
          param_(job.param, job, whole, 0),
          state_{Rows(work.states > 0 ? job.state[0] : job.param, job, whole, 0),
                 Rows(work.states > 1 ? job.state[1] : job.param, job, whole, 0),
                 Rows(work.states > 2 ? job.state[2] : job.param, job, whole, 0)} {}

    CatchUpResult run(const CatchUpSlice& share) {
        int64_t count = 0;
        for (int64_t i = share.begin; i < share.end; ++i) {
            own_[count] = job_.rows ? job_.rows[i] : i;
            count += share.parts == 1 || owner(own_[count], share.parts) == share.part;
            if (count == most_own) {
                catch_up_own(count);
                count = 0;
            }
        }
        catch_up_own(count);
        return done_;
    }

private:
    static constexpr int64_t most_own = 1024;

    // A row may occur several times, so each row belongs to one thread. Those whose last steps
    // share a cache line have the same.
    static int64_t owner(int64_t row, int64_t parts) {
        const uint64_t line = uint64_t(row) / (cache_line / sizeof(int32_t));
        return int64_t((((line * 0x9e3779b97f4a7c15u) >> 32) * uint64_t(parts)) >> 32);
    }

    void catch_up_own(int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
            // First the row's last step, later the row itself.
            if (i + 2 * prefetch_distance < count) {
                __builtin_prefetch(job_.last + own_[i + 2 * prefetch_distance], 0, 2);
            }
            if (i + prefetch_distance < count) prefetch(own_[i + prefetch_distance]);
            catch_up_row(own_[i]);
        }
    }

    SPARSESTEP_INLINE void prefetch(int64_t row) const {
        const int32_t last = job_.last[row] ^ job_.initial;
        if ((last < 0 ? ~last : last) >= job_.now) return;
        param_.prefetch(row);
        for (int s = 0; s < job_.states; ++s) state_[s].prefetch(row);
    }

    void catch_up_row(int64_t row) {
        const int32_t last = job_.last[row] ^ job_.initial;
        job_.last[row] = (last >= 0 ? job_.now : ~job_.now) ^ job_.initial;
        Missed missed{};
        missed.since = (last < 0 ? ~last : last) - job_.base;
        missed.now = job_.now - job_.base;
        missed.had_gradient = last >= 0;
        if (missed.since >= missed.now) return;
        ++done_.deferred;
        done_.stale += job_.constraint.norm > 0 ? replay_constrained(row, missed)
                                                : catch_up_steps(row, missed);
    }

    // Steps one by one, each with its constraint, as long as they turn the row; the rest at once.
    // Returns whether the row was stale.
    bool replay_constrained(int64_t row, Missed missed) {
        bool stale = false;
        const int64_t single_steps = has_buffer(row) ? job_.single_steps : 1;
        const int64_t now = missed.now, last_single = missed.since + single_steps;
        for (; missed.since < now; missed.since = missed.now) {
            missed.now = missed.since < last_single ? missed.since + 1 : now;
            stale |= catch_up_steps(row, missed);
            T* const param = param_.load(row, 0, job_.slot_size, nullptr);
            stale |= constrain_row(job_.constraint, param, job_.slot_size);
        }
        return stale;
    }

    // Whether there is anything to move along.
    bool has_buffer(int64_t row) const {
        if (job_.buffer < 0) return false;
        const T* const buffer = state_[job_.buffer].load(row, 0, job_.slot_size, nullptr);
        for (int64_t j = 0; j < job_.slot_size; ++j) {
            if (buffer[j] != 0) return true;
        }
        return false;
    }

    bool catch_up_steps(int64_t row, Missed missed) {
        const int64_t count = missed.now - missed.since;
        missed.row_square = decay_slot_states(row, count);
        update_.enter_row(missed);
        bool moved = false;
        for (int64_t offset = 0; offset < job_.slot_size; offset += tile_size) {
            moved |= catch_up_tile(row, offset, count);
        }
        return update_.is_stale(moved);
    }

    // Returns the old value of the square that the idle update divides by, if it is per row.
    double decay_slot_states(int64_t row, int64_t count) const {
        double square = 0;
        for (int s = 0; s < job_.slot_states; ++s) {
            const double* powers = job_.powers[job_.states + s];
            double value;
            load_tile(job_.slot_state[s], row, 0, 1, &value);
            if (s == job_.square - job_.states) square = value;
            if (!powers) continue;
            value *= powers[count];
            store_tile(job_.slot_state[s], row, 0, 1, &value);
        }
        return square;
    }

    bool catch_up_tile(int64_t row, int64_t offset, int64_t count) {
        const int64_t rest = job_.slot_size - offset;
        const int64_t m = rest < tile_size ? rest : tile_size;
        T* param = param_.load(row, offset, m, param_tile_);
        T* state[3];
        for (int s = 0; s < job_.states; ++s) {
            state[s] = state_[s].load(row, offset, m, state_tiles_[s]);
        }
        const bool moved = update_.move(param, state, m);
        param_.store(row, offset, m, param);
        for (int s = 0; s < job_.states; ++s) {
            if (!job_.powers[s]) continue;
            update_.decay(s, state[s], job_.powers[s][count], m);
            state_[s].store(row, offset, m, state[s]);
        }
        return moved;
    }

    const CatchUpJob& job_;
    IdleUpdate update_;
    const Rows param_;
    const Rows state_[3];
    alignas(cache_line) T param_tile_[tile_size];
    alignas(cache_line) T state_tiles_[3][tile_size];
    int64_t own_[most_own + 1];
    CatchUpResult done_{};
};

template <template <class> class IdleUpdate, class T>
CatchUpResult catch_up(const CatchUpJob& work, const CatchUpSlice& share) {
    Job job{};
    job.param = work.param;
    job.slot_size = work.slot_size;
    for (int s = 0; s < work.states; ++s) job.state[s] = work.state[s];
    const JobSlice whole{0, 0, 0, work.slot_size};
    bool stored = is_stored_as<T>(work.param);
    for (int s = 0; s < work.states; ++s) stored &= is_stored_as<T>(work.state[s]);
    if (!stored)
        return CatchUpLoop<T, IdleUpdate<T>, ConvertedRows<T>>(work, job, whole).run(share);
    return CatchUpLoop<T, IdleUpdate<T>, DirectRows<T, 0>>(work, job, whole).run(share);
}

// All idle updates; see SPARSESTEP_RULES.
#define SPARSESTEP_IDLE_UPDATES(X) X(Still) X(Geometric) X(SignDrift) X(Quotient) X(RecomputeFtrl)

}  // namespace
}  // namespace sparsestep
