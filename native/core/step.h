// One optimizer step: all jobs are prepared, then all are applied.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/dedup.h"
#include "core/memory.h"
#include "core/types.h"

namespace sparsestep {

// A index that is no slot of its parameter.
struct OutOfRange {
    int64_t job;
    int64_t entry;
    int64_t index;
};

// The jobs must outlive it, and are completed by it.
class Step {
public:
    Step(Job* jobs, int64_t count, int threads);

    // Checks every index and allocates all that the step needs: everything that can fail. Returns
    // the first bad entry, if there is one. Nothing of parameters and states is written.
    std::optional<OutOfRange> prepare();

    // Writes parameters and states; cannot fail.
    void apply() noexcept;

private:
    template <class Which>
    void for_all(int64_t (Dedup::*count)() const, void (Dedup::*run)(int64_t), Which which);
    std::optional<OutOfRange> first_out_of_range();
    void find_groups();
    void find_overlaps();
    template <class IsWritten>
    void copy_if(Job& job, const IsWritten& is_written);  // what it reads and the step writes
    void add_slices(int64_t job);
    void add_large_group(int64_t job, int64_t group);
    void apply(size_t begin, size_t end);
    void find_lazy_state();
    void touch_state(int64_t job, const JobSlice& slice) const;

    // A job's state in memory of which pages may be new.
    struct LazyRows {
        int64_t job;
        LazyState* state;
        int64_t stride, bytes;
    };

    Job* jobs_;
    int64_t count_;
    int threads_;
    bool params_overlap_ = false;
    std::vector<Dedup> dedups_;
    std::vector<std::pair<Dedup*, int64_t>> tasks_;
    std::vector<std::pair<int64_t, JobSlice>> slices_;
    std::vector<std::unique_ptr<char[]>> copies_;
    std::vector<LazyRows> lazy_rows_;
    Scratch scratch_;
};

// Prepares and applies in one go.
std::optional<OutOfRange> step(Job* jobs, int64_t count, int threads);

}  // namespace sparsestep
