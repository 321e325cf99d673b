// Dense semantics: what idle rows missed, done at once. The arithmetic, and the oracle of the
// tests, are in src/sparsestep/dense.
//
// Included by kernels.cpp alone; everything has internal linkage (see types.h for the reason).
#pragma once

#include "core/types.h"
#include "kernels/gradients.h"
#include "kernels/rows.h"
#include "rules/math.h"

namespace sparsestep {
namespace {

// What an average whose sign counts never becomes smaller than.
inline double least_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::float16: return 0x1p-24;
        case Dtype::float64: return 0x1p-1022;
        default: return 0x1p-126;
    }
}

template <class T, class Rows>
class CatchUpLoop {
public:
    CatchUpLoop(const CatchUpWork& work, const Job& job, const Piece& whole)
        : work_(work),
          param_(job.param, job, whole, 0),
          rows_{Rows(work.states > 0 ? job.state[0] : job.param, job, whole, 0),
                Rows(work.states > 1 ? job.state[1] : job.param, job, whole, 0),
                Rows(work.states > 2 ? job.state[2] : job.param, job, whole, 0)} {}

    CaughtUp run(const CatchUpShare& share) {
        int64_t count = 0;
        for (int64_t i = share.begin; i < share.end; ++i) {
            own_[count] = work_.rows ? work_.rows[i] : i;
            count += share.parts == 1 || owner(own_[count], share.parts) == share.part;
            if (count == most_own) {
                bring(count);
                count = 0;
            }
        }
        bring(count);
        return done_;
    }

private:
    static constexpr int64_t most_own = 1024;

    // A row may come several times, so rows have owners. Those whose last steps share a cache line
    // have the same.
    static int64_t owner(int64_t row, int64_t parts) {
        const uint64_t line = uint64_t(row) / (cache_line / sizeof(int32_t));
        return int64_t((((line * 0x9e3779b97f4a7c15u) >> 32) * uint64_t(parts)) >> 32);
    }

    void bring(int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
            // First the step that a row has reached, later what depends on it.
            if (i + 2 * prefetch_distance < count) {
                __builtin_prefetch(work_.last + own_[i + 2 * prefetch_distance], 0, 2);
            }
            if (i + prefetch_distance < count) prefetch(own_[i + prefetch_distance]);
            bring_row(own_[i]);
        }
    }

    SPARSESTEP_INLINE void prefetch(int64_t row) const {
        const int32_t last = work_.last[row];
        if ((last < 0 ? ~last : last) >= work_.now) return;
        param_.prefetch(row);
        for (int s = 0; s < work_.states; ++s) rows_[s].prefetch(row);
    }

    void bring_row(int64_t row) {
        const int32_t last = work_.last[row];
        work_.last[row] = last >= 0 ? work_.now : ~work_.now;
        const int64_t since = (last < 0 ? ~last : last) - work_.base;
        const int64_t n = work_.now - work_.base;
        if (since >= n) return;
        const bool led = catch_up(row, since, n);
        const bool moved = last >= 0 && has_moved(since, n);
        const bool decayed = work_.growth[since] != work_.growth[n];
        ++done_.behind;
        done_.stale += work_.along == Along::leader ? led : moved || decayed;
    }

    // Whether a buffer that is not zero has moved the parameter.
    bool has_moved(int64_t since, int64_t n) const {
        switch (work_.along) {
            case Along::nothing: return false;
            case Along::sign: return work_.sums[0][n] != work_.sums[0][since];
            default: return !work_.converges || work_.sums[0][since] != 0;
        }
    }

    // Returns whether FTRL's leader is another.
    bool catch_up(int64_t row, int64_t since, int64_t n) {
        const double grown = work_.growth[n];
        const double decay = work_.growth[since] / grown - 1;
        double sums[4];
        for (int i = 0; i < 4; ++i) sums[i] = work_.sums[i][since] / grown;
        const bool signed_average = work_.along == Along::sign;
        if (signed_average) {
            const int64_t end = work_.first > 0 ? n : since + 1;  // then there is no sign left
            sums[0] = (work_.sums[0][end] - work_.sums[0][since]) / grown;
        }
        const double fades[] = {1, work_.firsts[n - since], work_.seconds[n - since]};
        double row_square = 0;
        for (int s = 0; s < work_.slot_states; ++s) {
            double kept;
            load_tile(work_.slot_state[s], row, 0, 1, &kept);
            if (s == work_.square - work_.states) row_square = kept;
            kept *= fades[work_.fade[work_.states + s]];
            store_tile(work_.slot_state[s], row, 0, 1, &kept);
        }
        bool led = false;
        for (int64_t offset = 0; offset < work_.block; offset += tile_size) {
            const int64_t rest = work_.block - offset;
            const int64_t m = rest < tile_size ? rest : tile_size;
            T* param = param_.load(row, offset, m, param_tile_);
            T* state[3];
            for (int s = 0; s < work_.states; ++s) {
                state[s] = rows_[s].load(row, offset, m, state_tiles_[s]);
            }
            const bool in_tile = work_.square >= 0 && work_.square < work_.states;
            led |= move(param, work_.buffer >= 0 ? state[work_.buffer] : nullptr,
                        in_tile ? state[work_.square] : nullptr, T(row_square), m, since, n,
                        T(decay), sums, state);
            param_.store(row, offset, m, param);
            for (int s = 0; s < work_.states; ++s) {
                if (!work_.fade[s]) continue;
                const double factor = fades[work_.fade[s]];
                if (signed_average && s == work_.buffer && work_.first > 0) {
                    scale_signed(state[s], T(factor), T(least_of(work_.state[s].dtype)), m);
                } else {
                    scale(state[s], factor, m);
                }
                rows_[s].store(row, offset, m, state[s]);
            }
        }
        return led;
    }

    // Close to one, the difference to one has the more exact digits.
    static void scale(T* __restrict tile, double factor, int64_t m) {
        if (factor > 0.5) {
            const T more = T(factor - 1);
            for (int64_t j = 0; j < m; ++j) tile[j] += tile[j] * more;
        } else {
            const T whole = T(factor);
            for (int64_t j = 0; j < m; ++j) tile[j] *= whole;
        }
    }

    static void scale_signed(T* __restrict tile, T factor, T least, int64_t m) {
        for (int64_t j = 0; j < m; ++j) {
            const T faded = tile[j] * factor;
            tile[j] = magnitude(faded) < least ? sign(tile[j]) * least : faded;
        }
    }

    bool move(T* __restrict param, const T* __restrict buffer, const T* __restrict square,
              T row_square, int64_t m, int64_t since, int64_t n, T decay, const double* sums,
              T* const* state) {
        const T s0 = T(sums[0]), s1 = T(sums[1]), s2 = T(sums[2]), s3 = T(sums[3]);
        switch (work_.along) {
            case Along::nothing:
                for (int64_t j = 0; j < m; ++j) param[j] += param[j] * decay;
                return false;
            case Along::sign:
                for (int64_t j = 0; j < m; ++j) {
                    param[j] += param[j] * decay - sign(buffer[j]) * s0;
                }
                return false;
            case Along::buffer: {
                const T total = work_.converges ? s0 : T(follow(0, since, n));
                for (int64_t j = 0; j < m; ++j) param[j] += param[j] * decay - buffer[j] * total;
                return false;
            }
            case Along::leader: {
                const bool rested = work_.sums[0][n] == work_.sums[0][since];
                return !rested && lead(param, state[0], state[1], m);
            }
            case Along::quotient: break;
        }
        const int64_t missed = n - since < work_.reach ? n - since : work_.reach;
        const T eps = T(work_.eps);
        // A square that is smaller than this has to be followed step by step.
        const double faded = work_.fading == 1 ? 1 : work_.seconds[missed];
        const double bound = work_.eps / work_.small;
        const T least = work_.converges ? T(bound * bound / faded) : T(__builtin_inf());
        std::conditional_t<sizeof(T) == 4, int32_t, int64_t> followed = 0;  // as wide as T
        for (int64_t j = 0; j < m; ++j) {
            const T v = square ? square[j] : row_square;
            const bool series = v >= least && v > 0;
            const T inverse = 1 / square_root(series ? v : T(1));
            const T y = -eps * inverse;
            const T move = buffer[j] * inverse * (s0 + y * (s1 + y * (s2 + y * s3)));
            moves_[j] = series ? move : T(0);
            followed += !series & (buffer[j] != 0);
        }
        if (followed) {
            for (int64_t j = 0; j < m; ++j) {
                const double v = square ? double(square[j]) : double(row_square);
                if ((T(v) >= least && v > 0) || buffer[j] == 0) continue;
                moves_[j] = T(double(buffer[j]) * follow(square_root(v), since, n));
            }
        }
        for (int64_t j = 0; j < m; ++j) param[j] += param[j] * decay - moves_[j];
        return false;
    }

    // The sum of an entry's moves, for a buffer of one, step by step.
    double follow(double root, int64_t since, int64_t n) const {
        const int64_t most = since + work_.follow;
        const int64_t end = n < most ? n : most;
        const bool quotient = work_.along == Along::quotient;
        double total = 0, fade = 1, first = 1;
        for (int64_t step = since + 1; step <= end; ++step) {
            fade *= work_.fading;
            first *= work_.first;
            const double weight = work_.sizes[step] * work_.growth[step] * first;
            total += quotient ? weight / (root * fade / work_.roots[step] + work_.eps) : weight;
        }
        return total / work_.growth[n];
    }

    // Returns whether it moves anything by more than a rounding, of bfloat16.
    bool lead(T* __restrict param, const T* __restrict linear, const T* __restrict sum,
              int64_t m) const {
        if (work_.rate == 0) return false;
        const T rate = T(work_.rate), beta = T(work_.beta), l1 = T(work_.l1), l2 = T(work_.l2);
        bool moved = false;
        for (int64_t j = 0; j < m; ++j) {
            const T beyond = sign(linear[j]) * l1 - linear[j];
            const T leader = beyond / ((beta + square_root(sum[j])) * rate + l2);
            const T next = magnitude(linear[j]) <= l1 ? T(0) : leader;
            moved |= magnitude(next - param[j]) > magnitude(next) / 256;
            param[j] = next;
        }
        return moved;
    }

    const CatchUpWork& work_;
    const Rows param_;
    const Rows rows_[3];
    alignas(cache_line) T param_tile_[tile_size];
    alignas(cache_line) T state_tiles_[3][tile_size];
    alignas(cache_line) T moves_[tile_size];
    int64_t own_[most_own + 1];
    CaughtUp done_{};
};

template <class T>
CaughtUp catch_up(const CatchUpWork& work, const CatchUpShare& share) {
    Job job{};
    job.param = work.param;
    job.block = work.block;
    for (int s = 0; s < work.states; ++s) job.state[s] = work.state[s];
    const Piece whole{0, 0, 0, work.block};
    bool stored = is_stored_as<T>(work.param);
    for (int s = 0; s < work.states; ++s) stored &= is_stored_as<T>(work.state[s]);
    if (!stored) return CatchUpLoop<T, ConvertedRows<T>>(work, job, whole).run(share);
    return CatchUpLoop<T, StoredRows<T, 0>>(work, job, whole).run(share);
}

}  // namespace
}  // namespace sparsestep
