// The slots of a compressed gradient (CSR, BSR), written out row by row of the parameter. So they
// come in ascending order, for any height of a block, and memory is visited from front to
// back.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/threads.h"

namespace sparsestep {

// Compressed rows of blocks. Block e of group g covers `block_rows` rows of the parameter from g *
// block_rows on, and in each of them the slot others[e] of `row_slots`.
struct CompressedSlots {
    const int64_t* starts;  // of each group, and the end: groups + 1 numbers
    const int64_t* others;
    int64_t groups, entries, block_rows, row_slots;
};

// Fills in the slot of every row of every block, and which row of the values it has (`value_index`,
// which blocks of one row do not need). False if the indices are not valid; the outputs are then
// undefined.
inline bool slots_of(const CompressedSlots& from, int64_t* indices, int64_t* value_index,
                     int threads) {
    // What the loop below relies on; a few numbers beside the entries.
    if (from.starts[0] != 0 || from.starts[from.groups] != from.entries) return false;
    for (int64_t g = 0; g < from.groups; ++g) {
        if (from.starts[g] > from.starts[g + 1]) return false;
    }
    constexpr int64_t serial_entries = 1 << 14;
    constexpr int64_t tasks = 16;
    std::atomic<bool> valid{true};
    const int team = from.entries * from.block_rows < serial_entries ? 1 : threads;
    parallel(team, tasks, [&](int64_t task) {
        bool inside = true;
        const int64_t last = from.groups * (task + 1) / tasks;
        for (int64_t g = from.groups * task / tasks; g < last; ++g) {
            const int64_t begin = from.starts[g], end = from.starts[g + 1];
            int64_t at = begin * from.block_rows;
            for (int64_t row = 0; row < from.block_rows; ++row) {
                const int64_t first = (g * from.block_rows + row) * from.row_slots;
                for (int64_t e = begin; e < end; ++e, ++at) {
                    inside &= uint64_t(from.others[e]) < uint64_t(from.row_slots);
                    indices[at] = int64_t(uint64_t(first) + uint64_t(from.others[e]));
                    if (value_index) value_index[at] = e * from.block_rows + row;
                }
            }
        }
        if (!inside) valid = false;
    });
    return valid;
}

}  // namespace sparsestep
