// Dense semantics: what idle rows missed, done at once. How they move is in motions.h; the oracle
// of the tests is in src/sparsestep/deferred.
//
// Included by kernels.cpp alone; everything has internal linkage (see types.h for the reason).
#pragma once

#include "core/types.h"
#include "kernels/grads.h"
#include "kernels/idle.h"
#include "kernels/rows.h"

namespace sparsestep {
namespace {

template <class T, class Motion, class Rows>
class CatchUpLoop {
public:
    CatchUpLoop(const CatchUpWork& work, const Job& job, const Piece& whole)
        : work_(work),
          motion_(work),
          param_(job.param, job, whole, 0),
          state_{Rows(work.states > 0 ? job.state[0] : job.param, job, whole, 0),
                 Rows(work.states > 1 ? job.state[1] : job.param, job, whole, 0),
                 Rows(work.states > 2 ? job.state[2] : job.param, job, whole, 0)} {}

    CaughtUp run(const CatchUpShare& share) {
        int64_t count = 0;
        for (int64_t i = share.begin; i < share.end; ++i) {
            own_[count] = work_.rows ? work_.rows[i] : i;
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

    // A row may come several times, so rows have owners. Those whose last steps share a cache line
    // have the same.
    static int64_t owner(int64_t row, int64_t parts) {
        const uint64_t line = uint64_t(row) / (cache_line / sizeof(int32_t));
        return int64_t((((line * 0x9e3779b97f4a7c15u) >> 32) * uint64_t(parts)) >> 32);
    }

    void catch_up_own(int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
            // First the step that a row has reached, later what depends on it.
            if (i + 2 * prefetch_distance < count) {
                __builtin_prefetch(work_.last + own_[i + 2 * prefetch_distance], 0, 2);
            }
            if (i + prefetch_distance < count) prefetch(own_[i + prefetch_distance]);
            catch_up_row(own_[i]);
        }
    }

    SPARSESTEP_INLINE void prefetch(int64_t row) const {
        const int32_t last = work_.last[row];
        if ((last < 0 ? ~last : last) >= work_.now) return;
        param_.prefetch(row);
        for (int s = 0; s < work_.states; ++s) state_[s].prefetch(row);
    }

    void catch_up_row(int64_t row) {
        const int32_t last = work_.last[row];
        work_.last[row] = last >= 0 ? work_.now : ~work_.now;
        Missed missed{};
        missed.since = (last < 0 ? ~last : last) - work_.base;
        missed.now = work_.now - work_.base;
        missed.had_gradient = last >= 0;
        if (missed.since >= missed.now) return;
        const int64_t count = missed.now - missed.since;
        missed.row_square = decay_slot_states(row, count);
        motion_.enter_row(missed);
        bool moved = false;
        for (int64_t offset = 0; offset < work_.block; offset += tile_size) {
            moved |= catch_up_tile(row, offset, count);
        }
        ++done_.behind;
        done_.stale += motion_.is_stale(moved);
    }

    // Returns the square that the motion divides by, as it was, if it is one of them.
    double decay_slot_states(int64_t row, int64_t count) const {
        double square = 0;
        for (int s = 0; s < work_.slot_states; ++s) {
            const double* powers = work_.powers[work_.states + s];
            double value;
            load_tile(work_.slot_state[s], row, 0, 1, &value);
            if (s == work_.square - work_.states) square = value;
            if (!powers) continue;
            value *= powers[count];
            store_tile(work_.slot_state[s], row, 0, 1, &value);
        }
        return square;
    }

    bool catch_up_tile(int64_t row, int64_t offset, int64_t count) {
        const int64_t rest = work_.block - offset;
        const int64_t m = rest < tile_size ? rest : tile_size;
        T* param = param_.load(row, offset, m, param_tile_);
        T* state[3];
        for (int s = 0; s < work_.states; ++s) {
            state[s] = state_[s].load(row, offset, m, state_tiles_[s]);
        }
        const bool moved = motion_.move(param, state, m);
        param_.store(row, offset, m, param);
        for (int s = 0; s < work_.states; ++s) {
            if (!work_.powers[s]) continue;
            motion_.decay(s, state[s], work_.powers[s][count], m);
            state_[s].store(row, offset, m, state[s]);
        }
        return moved;
    }

    const CatchUpWork& work_;
    Motion motion_;
    const Rows param_;
    const Rows state_[3];
    alignas(cache_line) T param_tile_[tile_size];
    alignas(cache_line) T state_tiles_[3][tile_size];
    int64_t own_[most_own + 1];
    CaughtUp done_{};
};

template <template <class> class Motion, class T>
CaughtUp catch_up(const CatchUpWork& work, const CatchUpShare& share) {
    Job job{};
    job.param = work.param;
    job.block = work.block;
    for (int s = 0; s < work.states; ++s) job.state[s] = work.state[s];
    const Piece whole{0, 0, 0, work.block};
    bool stored = is_stored_as<T>(work.param);
    for (int s = 0; s < work.states; ++s) stored &= is_stored_as<T>(work.state[s]);
    if (!stored) return CatchUpLoop<T, Motion<T>, ConvertedRows<T>>(work, job, whole).run(share);
    return CatchUpLoop<T, Motion<T>, StoredRows<T, 0>>(work, job, whole).run(share);
}

}  // namespace
}  // namespace sparsestep
