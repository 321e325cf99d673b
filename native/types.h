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

// A share of a job: entries [begin, end) and columns [first_column, last_column) of their blocks.
// Entries that are marked as taken (see Link) are passed over, unless the piece is the chain that
// begins with the one entry `begin`: then `end` is `heavy_piece`.
struct Piece {
    int64_t begin, end;
    int64_t first_column, last_column;
};
constexpr int64_t heavy_piece = -1;

// Applies a job's rule to a piece of it.
using Apply = void (*)(const Job& job, const Piece& piece);

// Where a slot comes more than once, its entries form a chain in order of appearance. An entry
// holds the number of the next one; all but the first are marked as taken along by the first.
using Link = uint32_t;
constexpr Link taken = 0x80000000u;
constexpr Link chain_end = 0x7fffffffu;  // so a gradient has fewer entries than that

// One gradient to apply to one parameter.
struct Job {
    bool whole;                // one entry, whose slot is the whole parameter; no positions
    const int64_t* positions;  // a slot for each entry
    const Link* links;         // null: no slot comes twice
    int64_t entries;
    int64_t slots;
    int64_t block;
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

// What the benchmark's limit (limit.h) is told in advance: slots in order of first appearance, and
// the entries of slot i at entries[offsets[i]] to entries[offsets[i + 1]]. float32, contiguous
// rows.
struct LimitWork {
    const int64_t* slots;
    const int64_t* offsets;
    const int64_t* entries;
    float* param;
    float* exp_avg;
    float* exp_avg_sq;
    const float* grads;
    int64_t dim;  // a multiple of 16, at most max_limit_dim
    double coefficients[4];
};
constexpr int64_t max_limit_dim = 512;
using Limit = void (*)(const LimitWork& work, int64_t begin, int64_t end);

struct KernelTable {
    const RuleKernels* rules;
    int count;
    Limit limit;
};

}  // namespace sparsestep
