// Embedding lookups in any number of tables at once; threads share the bags of all tables. The loop
// is kernels/lookup.cpp, compiled once per instruction set.
#pragma once

#include <cstdint>

#include "core/types.h"

namespace sparsestep {

// Copy each row, reduce the rows of a bag, or multiply each row by the query of its bag.
enum class Pooling : int32_t { none = 0, sum = 1, mean = 2, max = 3, dot = 4 };

// Integers of four or eight bytes.
struct Integers {
    const void* data;
    bool is_short;
};

// A lookup in a table of [rows, columns], each row contiguous. Memory is checked, ids and starts
// are not. Without pooling, each id is a bag.
struct LookupWork {
    const void* table;
    Dtype dtype;
    int64_t rows, columns;
    int64_t row_stride;  // in elements
    Integers ids;
    int64_t id_count;
    Integers starts;      // start of each bag; no data: bags of equal length
    int64_t start_count;  // one per bag, or one more: the end of the last bag
    int64_t bags, length;
    Pooling pooling;
    const void* factors;   // one per id, of the table's dtype; null: none
    const void* queries;   // [bags, columns], of the table's dtype, for dot products
    int64_t padding;       // the id to skip; -1: none
    void* output;          // [bags, columns]; for dot products, one number per id
    int64_t* indices;      // a copy of the ids, without padding
    int64_t* value_index;  // the bag of each id; null: not needed
    int64_t* winners;      // [bags, columns]: the row of each maximum; null: not needed
    int64_t* counted;      // ids of each bag without padding; null: not needed
};

// First id of a range of bags, and the number of its ids without padding, which come first in
// `indices`. Negative: an id is out of range, or the starts are invalid.
struct LookedUp {
    int64_t begin, counted;
};

// Looks up the bags [first, last).
using Lookup = LookedUp (*)(const LookupWork& work, int64_t first, int64_t last);

// Looks up all tables and fills in, for each, the number of ids without padding, which come first
// in `indices` and `value_index`. False, with undefined outputs, if an id is out of range or the
// starts are invalid.
bool look_up(const LookupWork* works, int64_t count, Lookup run, int threads, int64_t* counted);

}  // namespace sparsestep
