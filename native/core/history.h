// The sums over past steps from which idle rows catch up; see src/sparsestep/deferred/history.py.
#pragma once

#include <cstdint>

#include "core/types.h"

namespace sparsestep {

// A step of Adam's, as seen from past steps in a row.
struct AdamStep {
    const double* centers;        // of the past steps
    const double* buffer_powers;  // the decay of a buffer since then
    const double* root_powers;    // and that of the root of a square
    int64_t count;                // of past steps
    double move, root;
};

// Adds the step to the sums of each past step: series_terms coefficients, and a bound on the rest
// of the series.
void add_step_to_series(const AdamStep& step, double* sums);

}  // namespace sparsestep
