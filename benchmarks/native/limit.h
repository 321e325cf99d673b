// The limit that benchmarks are measured against: the least that any implementation of an update
// must do. It is told in advance which slots come and which entries belong to each, so it only
// reads each gradient row once and reads and writes each touched row of parameter and state once.
//
// It is a module of its own (module.cpp), and no optimizer uses it. Its loop (limit.cpp) is written
// apart from the one that does, so that neither hides a weakness of the other.
#pragma once

#include <cstdint>

#include "core/types.h"

namespace sparsestep {

constexpr int64_t limit_line = 16;  // floats in a cache line
constexpr int64_t max_limit_dim = 512;

// Slots in order of first appearance, and the entries of slot i at entries[offsets[i]] to
// entries[offsets[i + 1]]. float32, contiguous rows.
struct LimitWork {
    const int64_t* slots;
    const int64_t* offsets;
    const int64_t* entries;
    const float* grads;
    float* param;
    float* state[max_states];
    float* slot_state[max_slot_states];
    int64_t dim;  // a multiple of limit_line, at most max_limit_dim
    double options[max_options];
    double step;
};

// Updates the slots [begin, end).
using Limit = void (*)(const LimitWork& work, int64_t begin, int64_t end);

struct RuleLimit {
    const char* name;
    int states;
    int slot_states;
    int options;
    Limit run;
};

// Bags of as many ids each: the sum of each bag's rows.
struct LookupWork {
    const int64_t* ids;
    const float* table;
    float* sums;
    int64_t dim;  // a multiple of limit_line
    int64_t per_bag;
    int64_t bags;
};

// Sums the bags [begin, end).
using LookupLimit = void (*)(const LookupWork& work, int64_t begin, int64_t end);

struct LimitTable {
    const RuleLimit* rules;
    int count;
    LookupLimit look_up;
};

// One function per instruction set that limit.cpp is compiled for.
LimitTable limits_baseline();
LimitTable limits_avx2();
LimitTable limits_avx512();

}  // namespace sparsestep
