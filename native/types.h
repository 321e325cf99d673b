// The plain data that Python's side, the partition and the kernels hand to each other.
// Nothing here has code of its own: this header is seen by translation units that are compiled
// for different instruction sets, and a shared inline function could be merged into the wrong one.
#pragma once

#include <cstdint>

namespace sparsestep {

enum class Dtype : int32_t { float16 = 0, bfloat16 = 1, float32 = 2, float64 = 3 };

// A tensor seen as [slots, block]. Strides are in elements.
struct View {
    void* data;
    Dtype dtype;
    int64_t slot_stride;
    int64_t element_stride;
};

constexpr int max_states = 4;
constexpr int max_coefficients = 16;

struct Job;

// Which entries of a job to apply, and in which order. Entries of one slot stand together, in order
// of appearance. With `keys`, entry i is `keys[i] & entry_mask` and its slot `keys[i] >> entry_bits`;
// without, entry i is `first + i` and its slot `positions[first + i]`.
struct Entries {
    const uint64_t* keys;
    int64_t first;
    int64_t count;
};

// Applies a job's rule to the given entries, columns [column_begin, column_end) of the block.
using Apply = void (*)(const Job& job, const Entries& entries, int64_t column_begin,
                       int64_t column_end);

// One gradient to apply to one parameter.
struct Job {
    const int64_t* positions;  // null: the gradient covers slot 0, which is the whole parameter
    int64_t entries;
    int64_t slots;
    int64_t block;
    int32_t entry_bits;
    bool negate;  // maximize: the gradient is read with the opposite sign
    View values;  // [entries, block]
    View param;
    View state[max_states];
    double coefficients[max_coefficients];
    Apply apply;
};

// What one translation unit of kernels.cpp offers for one rule. The arithmetic is done in float
// unless a float64 tensor takes part.
struct RuleKernels {
    const char* name;
    int states;
    int coefficients;
    Apply apply_float;
    Apply apply_double;
};

struct KernelTable {
    const RuleKernels* rules;
    int count;
};

}  // namespace sparsestep
