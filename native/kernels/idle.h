// Dense semantics: what idle rows missed, applied at once. How a parameter moves without a gradient
// is a class for each idle update, the twins of those of src/sparsestep/rules/idle.py; the list of
// them is at the end.
//
// Internal linkage throughout: see types.h.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/types.h"
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

    // Of a term of the series, over the steps missed.
    T sum(int term) const { return T(job_.sums[term][missed_.since] / latest()); }
    bool has_moved_by_sums() const {
        return missed_.had_gradient && (!job_.converges || job_.sums[0][missed_.since] != 0);
    }

    // Of the sizes, over the steps up to `end`.
    double total_size(int64_t end) const {
        return (job_.sums[0][end] - job_.sums[0][missed_.since]) / latest();
    }
    bool has_total() const { return job_.sums[0][missed_.now] != job_.sums[0][missed_.since]; }

    // The sum of move(size, step) over the steps missed, one by one, as far as they matter. The
    // size is that of the step times what is left of the buffer by then.
    template <class Move>
    double replay(Move move) const {
        const int64_t most = missed_.since + job_.most_replayed;
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
    T decay_{};  // what weight decay has left of the parameter, less one
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
        total_ = this->job_.converges ? this->sum(0)
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

// Adam's: a buffer divided by the root of a square, where both decay.
template <class T>
class Quotient : public IdleUpdate<T> {
public:
    static constexpr const char* name = "quotient";

    explicit Quotient(const CatchUpJob& work)
        : IdleUpdate<T>(work), root_decay_(square_root(work.square_decay)) {}

    void enter_row(const Missed& missed) {
        IdleUpdate<T>::enter_row(missed);
        const CatchUpJob& work = this->job_;
        for (int i = 0; i < series_terms; ++i) sums_[i] = this->sum(i);
        const int64_t count = missed.now - missed.since;
        const int64_t relevant = count < work.horizon ? count : work.horizon;
        const double* powers = work.powers[work.square];
        const double left = powers ? powers[relevant] : 1;
        const double bound = work.eps / work.largest_ratio;
        least_ = work.converges ? T(bound * bound / left) : T(__builtin_inf());
    }
    bool move(T* __restrict param, T* const* state, int64_t m) {
        const T* buffer = state[this->job_.buffer];
        if (this->job_.square < this->job_.states) {
            find_moves(buffer, state[this->job_.square], m);
        } else {
            find_moves(buffer, T(this->missed_.row_square), m);
        }
        const T decay = this->decay_;
        for (int64_t j = 0; j < m; ++j) param[j] += param[j] * decay - moves_[j];
        return false;
    }
    bool is_stale(bool) const { return this->has_decayed() || this->has_moved_by_sums(); }

private:
    // By the series; where the square is too small for it, step by step.
    void find_moves(const T* __restrict buffer, const T* __restrict square, int64_t m) {
        const T s0 = sums_[0], s1 = sums_[1], s2 = sums_[2], s3 = sums_[3];
        const T eps = T(this->job_.eps), least = least_;
        Counter<T> replayed = 0;
        for (int64_t j = 0; j < m; ++j) {
            const T v = square[j];
            const bool series = v >= least && v > 0;
            const T inverse = 1 / square_root(series ? v : T(1));
            const T y = -eps * inverse;
            const T move = buffer[j] * inverse * (s0 + y * (s1 + y * (s2 + y * s3)));
            moves_[j] = series ? move : T(0);
            replayed += !series & (buffer[j] != 0);
        }
        if (!replayed) return;
        for (int64_t j = 0; j < m; ++j) {
            const T v = square[j];
            if ((v >= least && v > 0) || buffer[j] == 0) continue;
            moves_[j] = T(double(buffer[j]) * replay_entry(square_root(double(v))));
        }
    }

    // The same where all entries have one square.
    void find_moves(const T* __restrict buffer, T square, int64_t m) {
        if (square >= least_ && square > 0) {
            const T inverse = 1 / square_root(square);
            const T y = -T(this->job_.eps) * inverse;
            const T sum = sums_[0] + y * (sums_[1] + y * (sums_[2] + y * sums_[3]));
            for (int64_t j = 0; j < m; ++j) moves_[j] = buffer[j] * inverse * sum;
            return;
        }
        Counter<T> replayed = 0;
        for (int64_t j = 0; j < m; ++j) replayed += buffer[j] != 0;
        const double sum = replayed ? replay_entry(square_root(double(square))) : 0;
        for (int64_t j = 0; j < m; ++j) {
            moves_[j] = buffer[j] != 0 ? T(double(buffer[j]) * sum) : T(0);
        }
    }

    double replay_entry(double root) const {
        double left = 1;
        return this->replay([&](double size, int64_t step) {
            left *= root_decay_;
            return size / (root * left / this->job_.roots[step] + this->job_.eps);
        });
    }

    const double root_decay_;
    T sums_[series_terms];
    T least_{};  // the smallest square for which the series is exact enough
    alignas(64) T moves_[tile_size];
};

// The parameter is a function of the state: that of a rule, whose options may have changed.
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
            // First the step that a row has reached, later what depends on it.
            if (i + 2 * prefetch_distance < count) {
                __builtin_prefetch(job_.last + own_[i + 2 * prefetch_distance], 0, 2);
            }
            if (i + prefetch_distance < count) prefetch(own_[i + prefetch_distance]);
            catch_up_row(own_[i]);
        }
    }

    SPARSESTEP_INLINE void prefetch(int64_t row) const {
        const int32_t last = job_.last[row];
        if ((last < 0 ? ~last : last) >= job_.now) return;
        param_.prefetch(row);
        for (int s = 0; s < job_.states; ++s) state_[s].prefetch(row);
    }

    void catch_up_row(int64_t row) {
        const int32_t last = job_.last[row];
        job_.last[row] = last >= 0 ? job_.now : ~job_.now;
        Missed missed{};
        missed.since = (last < 0 ? ~last : last) - job_.base;
        missed.now = job_.now - job_.base;
        missed.had_gradient = last >= 0;
        if (missed.since >= missed.now) return;
        const int64_t count = missed.now - missed.since;
        missed.row_square = decay_slot_states(row, count);
        update_.enter_row(missed);
        bool moved = false;
        for (int64_t offset = 0; offset < job_.slot_size; offset += tile_size) {
            moved |= catch_up_tile(row, offset, count);
        }
        ++done_.deferred;
        done_.stale += update_.is_stale(moved);
    }

    // Returns the square that the idle update divides by, as it was, if it is one of them.
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

// All of them; see SPARSESTEP_RULES.
#define SPARSESTEP_IDLE_UPDATES(X) X(Still) X(Geometric) X(SignDrift) X(Quotient) X(RecomputeFtrl)

}  // namespace
}  // namespace sparsestep
