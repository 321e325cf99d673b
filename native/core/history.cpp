#include "core/history.h"

#include <cmath>

#include "core/types.h"

namespace sparsestep {

void add_step_to_series(const AdamStep& step, double* sums) {
    for (int64_t j = 0; j < step.count; ++j, sums += series_terms + 1) {
        const double t = std::sqrt(step.root_powers[j] / (step.root * step.centers[j]));
        const double ratio = (t - 1) / (t + 1);
        double term = step.move * step.buffer_powers[j] / t;
        sums[0] += term;
        term *= 2;
        for (int i = 1; i < series_terms; ++i) {
            term *= ratio;
            sums[i] += term;
        }
        sums[series_terms] += std::abs(term * ratio) / (1 - std::abs(ratio));
    }
}

}  // namespace sparsestep
