// One optimizer step: all jobs are checked, then all are applied.
#pragma once

#include <cstdint>
#include <optional>

#include "types.h"

namespace sparsestep {

// A position that is no slot of its parameter.
struct BadEntry {
    int64_t job;
    int64_t entry;
    int64_t position;
};

// Returns the first bad entry, with nothing written; or nothing, with everything written.
std::optional<BadEntry> step(Job* jobs, int64_t count, int threads);

}  // namespace sparsestep
