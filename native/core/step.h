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

// A position that is no slot of its parameter.
struct BadEntry {
    int64_t job;
    int64_t entry;
    int64_t position;
};

// The jobs must outlive it, and are completed by it.
class Step {
public:
    Step(Job* jobs, int64_t count, int threads);

    // Checks every position and allocates whatever the step needs: all that can fail. Returns the
    // first bad entry, if there is one. Nothing of parameters and states is written.
    std::optional<BadEntry> prepare();

    // Writes parameters and states; cannot fail.
    void apply() noexcept;

private:
    template <class Which>
    void for_all(int64_t (Unique::*count)() const, void (Unique::*run)(int64_t), Which which);
    std::optional<BadEntry> first_bad_entry();
    void find_groups();
    void find_overlaps();
    template <class IsWritten>
    void copy_if(Job& job, const IsWritten& is_written);  // what it reads and the step writes
    void add_pieces(int64_t job);
    void add_heavy(int64_t job, int64_t group);
    void apply(size_t begin, size_t end);

    Job* jobs_;
    int64_t count_;
    int threads_;
    bool params_overlap_ = false;
    std::vector<Unique> uniques_;
    std::vector<std::pair<Unique*, int64_t>> tasks_;
    std::vector<std::pair<int64_t, Piece>> pieces_;
    std::vector<std::unique_ptr<char[]>> copies_;
    Scratch scratch_;
};

// Prepares and applies in one go.
std::optional<BadEntry> step(Job* jobs, int64_t count, int threads);

}  // namespace sparsestep
