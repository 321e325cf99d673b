// Row constraints: an updated row whose 2-norm is too large, or not one, is rescaled.
// src/sparsestep/rules/options.py has the same in torch operations.
//
// Internal linkage throughout: see types.h.
#pragma once

#include "core/types.h"
#include "kernels/rows.h"
#include "rules/math.h"

namespace sparsestep {
namespace {

// Norms are taken in double, so that no square overflows; in as many lanes on every machine, since
// the order of a sum decides its last bits.
constexpr int norm_lanes = 8;

template <class T, class Of>
SPARSESTEP_INLINE void add_to_lanes(double* __restrict lanes, const T* __restrict row, int64_t n,
                                    const Of& of) {
    int64_t j = 0;
    for (; j + norm_lanes <= n; j += norm_lanes) {
        for (int lane = 0; lane < norm_lanes; ++lane) lanes[lane] += of(double(row[j + lane]));
    }
    for (int lane = 0; j < n; ++j, ++lane) lanes[lane] += of(double(row[j]));
}

// Returns whether the row has moved by more than a rounding, of bfloat16.
template <class T>
__attribute__((noinline)) bool constrain_row(const RowConstraint& constraint, T* row, int64_t n) {
    double lanes[norm_lanes] = {};
    add_to_lanes(lanes, row, n, [](double x) SPARSESTEP_LAMBDA { return x * x; });
    double total = 0;
    for (double lane : lanes) total += lane;
    const double norm = square_root(total);
    if (!(norm > constraint.above)) return false;
    const double factor = constraint.norm / norm;
    for (int64_t j = 0; j < n; ++j) row[j] = T(double(row[j]) * factor);
    return absolute(factor - 1) > 1.0 / 256;
}

// Constrains a row of the parameter, and stores it if it is converted: `kept` has all of it.
template <class T, class Rows>
__attribute__((noinline)) void constrain_slot(const RowConstraint& constraint, const Rows& param,
                                              int64_t slot, int64_t columns, T* kept) {
    if constexpr (Rows::is_direct) {
        constrain_row(constraint, param.load(slot, 0, columns, kept), columns);
    } else {
        constrain_row(constraint, kept, columns);
        for (int64_t offset = 0; offset < columns; offset += tile_size) {
            const int64_t rest = columns - offset;
            param.store(slot, offset, rest < tile_size ? rest : tile_size, kept + offset);
        }
    }
}

}  // namespace
}  // namespace sparsestep
