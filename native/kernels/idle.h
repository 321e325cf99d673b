// How a parameter moves without a gradient: the C++ twins of src/sparsestep/rules/idle.py, a
// struct for each motion. The list of them is at the end.
//
// Included by kernels.cpp alone; everything has internal linkage (see types.h for the reason).
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/types.h"
#include "kernels/tile.h"
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

// To count in a loop over T, as wide as T so that the loop is vectorised.
template <class T>
using Count = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

// What motions have in common. Each has a `name`, that of its twin, and besides what is here:
//
//   enter_row(missed)         looks up what the row needs
//   move(param, state, m)     moves a tile; returns whether the parameter is seen to have moved
//   is_stale(moved)           whether the row was not where it should have been
template <class T>
class Motion {
public:
    explicit Motion(const CatchUpWork& work) : work_(work) {}

    void enter_row(const Missed& missed) {
        missed_ = missed;
        decay_ = T(work_.inverse_decay[missed.since] / latest() - 1);
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
    double latest() const { return work_.inverse_decay[missed_.now]; }
    bool has_decayed() const { return work_.inverse_decay[missed_.since] != latest(); }

    // Of a term of the series, over the steps missed.
    T sum(int term) const { return T(work_.sums[term][missed_.since] / latest()); }
    bool has_moved_by_sums() const {
        return missed_.had_gradient && (!work_.converges || work_.sums[0][missed_.since] != 0);
    }

    // Of the sizes, over the steps up to `end`.
    double total_size(int64_t end) const {
        return (work_.sums[0][end] - work_.sums[0][missed_.since]) / latest();
    }
    bool has_total() const { return work_.sums[0][missed_.now] != work_.sums[0][missed_.since]; }

    // The sum of move(size, step) over the steps missed, one by one, as far as they matter. The
    // size is that of the step times what is left of the buffer by then.
    template <class Move>
    double replay(Move move) const {
        const int64_t most = missed_.since + work_.most_replayed;
        const int64_t end = missed_.now < most ? missed_.now : most;
        double total = 0, left = 1;
        for (int64_t step = missed_.since + 1; step <= end; ++step) {
            left *= work_.buffer_decay;
            total += move(work_.sizes[step] * work_.inverse_decay[step] * left, step);
        }
        return total / latest();
    }

    const CatchUpWork& work_;
    Missed missed_{};
    T decay_{};  // what weight decay has left of the parameter, less one
};

// Weight decay is all that changes the parameter.
template <class T>
class Still : public Motion<T> {
public:
    static constexpr const char* name = "still";
    using Motion<T>::Motion;

    bool move(T* __restrict param, T* const*, int64_t m) const {
        const T decay = this->decay_;
        for (int64_t j = 0; j < m; ++j) param[j] += param[j] * decay;
        return false;
    }
    bool is_stale(bool) const { return this->has_decayed(); }
};

// Along a buffer that decays: a geometric series.
template <class T>
class Geometric : public Motion<T> {
public:
    static constexpr const char* name = "geometric";
    using Motion<T>::Motion;

    void enter_row(const Missed& missed) {
        Motion<T>::enter_row(missed);
        total_ = this->work_.converges ? this->sum(0)
                                       : T(this->replay([](double size, int64_t) { return size; }));
    }
    bool move(T* __restrict param, T* const* state, int64_t m) const {
        const T* __restrict buffer = state[this->work_.buffer];
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
class SignDrift : public Motion<T> {
public:
    static constexpr const char* name = "sign_drift";
    using Motion<T>::Motion;

    void enter_row(const Missed& missed) {
        Motion<T>::enter_row(missed);
        // A buffer that is gone after one step has no sign from then on.
        drift_ = T(this->total_size(keeps_sign() ? missed.now : missed.since + 1));
    }
    bool move(T* __restrict param, T* const* state, int64_t m) const {
        const T* __restrict buffer = state[this->work_.buffer];
        const T decay = this->decay_, drift = drift_;
        for (int64_t j = 0; j < m; ++j) param[j] += param[j] * decay - sign(buffer[j]) * drift;
        return false;
    }
    void decay(int s, T* __restrict state, double factor, int64_t m) const {
        if (s != this->work_.buffer || !keeps_sign()) {
            Motion<T>::decay(s, state, factor, m);
            return;
        }
        const T whole = T(factor), least = T(least_of(this->work_.state[s].dtype));
        for (int64_t j = 0; j < m; ++j) {
            const T decayed = state[j] * whole;
            state[j] = magnitude(decayed) < least ? sign(state[j]) * least : decayed;
        }
    }
    bool is_stale(bool) const {
        return this->has_decayed() || (this->missed_.had_gradient && this->has_total());
    }

private:
    bool keeps_sign() const { return this->work_.buffer_decay > 0; }

    T drift_{};
};

// Adam's: a buffer divided by the root of a square, where both decay.
template <class T>
class Quotient : public Motion<T> {
public:
    static constexpr const char* name = "quotient";

    explicit Quotient(const CatchUpWork& work)
        : Motion<T>(work), root_decay_(square_root(work.square_decay)) {}

    void enter_row(const Missed& missed) {
        Motion<T>::enter_row(missed);
        const CatchUpWork& work = this->work_;
        for (int i = 0; i < series_terms; ++i) sums_[i] = this->sum(i);
        const int64_t count = missed.now - missed.since;
        const int64_t relevant = count < work.horizon ? count : work.horizon;
        const double* powers = work.powers[work.square];
        const double left = powers ? powers[relevant] : 1;
        const double bound = work.eps / work.largest_ratio;
        least_ = work.converges ? T(bound * bound / left) : T(__builtin_inf());
    }
    bool move(T* __restrict param, T* const* state, int64_t m) {
        const T* buffer = state[this->work_.buffer];
        if (this->work_.square < this->work_.states) {
            find_moves(buffer, state[this->work_.square], m);
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
        const T eps = T(this->work_.eps), least = least_;
        Count<T> replayed = 0;
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
            const T y = -T(this->work_.eps) * inverse;
            const T sum = sums_[0] + y * (sums_[1] + y * (sums_[2] + y * sums_[3]));
            for (int64_t j = 0; j < m; ++j) moves_[j] = buffer[j] * inverse * sum;
            return;
        }
        Count<T> replayed = 0;
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
            return size / (root * left / this->work_.roots[step] + this->work_.eps);
        });
    }

    const double root_decay_;
    T sums_[series_terms];
    T least_{};  // the smallest square for which the series is exact enough
    alignas(64) T moves_[tile_size];
};

// The parameter is a function of the state: that of a rule, whose options may have changed.
template <class T, template <class> class Rule>
class Recompute : public Motion<T> {
public:
    static constexpr const char* name = Rule<T>::name;

    explicit Recompute(const CatchUpWork& work)
        : Motion<T>(work), rule_(work.options, double(work.now)) {}

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
        Count<T> moved = 0;
        for (int64_t j = 0; j < m; ++j) {
            const T next = rule.recompute(state[j]...);
            moved += magnitude(next - param[j]) > magnitude(next) / 256;
            param[j] = next;
        }
        return moved != 0;
    }

    const Rule<T> rule_;
};

template <class T>
using RecomputeFtrl = Recompute<T, Ftrl>;

// All of them; see SPARSESTEP_RULES.
#define SPARSESTEP_MOTIONS(X) X(Still) X(Geometric) X(SignDrift) X(Quotient) X(RecomputeFtrl)

}  // namespace
}  // namespace sparsestep
