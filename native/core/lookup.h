// Lookups of embeddings, in any number of tables at once: all bags of all of them are shared out
// to the threads. The loop is kernels/lookup.cpp, compiled once per instruction set.
#pragma once

#include <cstdint>

#include "core/types.h"

namespace sparsestep {

// What becomes of the rows that are looked up: each is copied, or those of a bag become one.
enum class Pooling : int32_t { none = 0, sum = 1, mean = 2, max = 3 };

// Integers of four or eight bytes.
struct Integers {
    const void* data;
    bool is_short;
};

// A lookup in a table of [rows, columns], each row contiguous. Nothing of it has been checked but
// that the memory is there. Without pooling each id is a bag of its own.
struct LookupWork {
    const void* table;
    Dtype dtype;
    int64_t rows, columns;
    int64_t row_stride;  // in elements
    Integers ids;
    int64_t id_count;
    Integers starts;      // where each bag begins; no data: all bags are of one length
    int64_t start_count;  // as many as there are bags; or one more, where the last bag ends
    int64_t bags, length;
    Pooling pooling;
    const void* factors;   // one for each id, of the table's dtype; null: none
    int64_t padding;       // the id that does not count; -1: none
    void* output;          // [bags, columns]
    int64_t* indices;      // the ids, copied before they are checked, so that they cannot change
    int64_t* value_index;  // the bag of each id; null: not asked for
    int64_t* winners;      // [bags, columns], for the maximum: whose element it is; null: not asked
    int64_t* counted;      // for each bag, how many ids are no padding; null: not asked for
};

// Where the ids of some bags begin, and how many of them are no padding: these come first among the
// indices of those bags. Less than zero: an id is no row, or the starts do not cut ids into bags.
struct LookedUp {
    int64_t begin, counted;
};

// Does the bags [first, last).
using Lookup = LookedUp (*)(const LookupWork& work, int64_t first, int64_t last);

// Does all of them and fills in, for each, how many ids are no padding: these come first among its
// indices, and in its source. False, and what was written means nothing, where an id is no row of
// its table or the starts of bags are not valid.
bool look_up(const LookupWork* works, int64_t count, Lookup run, int threads, int64_t* counted);

}  // namespace sparsestep
