// The plain data that bindings, core and kernels hand to each other.
// Nothing here has code of its own: this header is seen by translation units that are compiled
// for different instruction sets, and a shared inline function could be merged into the wrong one.
#pragma once

#include <cstdint>

namespace sparsestep {

enum class Dtype : int32_t { float16 = 0, bfloat16 = 1, float32 = 2, float64 = 3 };
constexpr const char* dtype_names[] = {"float16", "bfloat16", "float32", "float64"};  // torch's

// A tensor seen as [num_slots, slot_size]. Strides are in elements.
struct TensorView {
    void* data;
    Dtype dtype;
    int64_t slot_stride;
    int64_t element_stride;
};

// A state tensor of one byte for each element: codes, and a scale for each slot. Strides are from
// slot to slot. What they stand for is said in src/sparsestep/rules/int8.py.
struct Int8View {
    int8_t* data;
    int64_t stride;
    float* scale;
    int64_t scale_stride;
    bool is_signed;
};

struct Memory {
    const void* data;
    int64_t bytes;
};

// The longest slot that is kept until all of its values are known: for the scale of codes, or for a
// norm before values are rounded.
constexpr int64_t max_kept_slot_size = 8192;

constexpr int max_states = 8;
constexpr int max_slot_states = 4;
constexpr int max_options = 8;

struct Job;
struct Program;  // see program.h

// Of a slot of a gradient, for clipping: of its absolute values, of its squares (their root), or
// the largest.
enum class Norm : int32_t { sum = 1, squares = 2, largest = 3 };

// A slot that occurs more than once: `count` of the duplicate entries from `begin` on, in order of
// appearance.
using Entry = uint32_t;
constexpr int64_t max_entries = 0x7fffffff;
struct DuplicateSlot {
    int64_t slot;
    Entry begin, count;
};

// The part of a job that one task runs: ranges of unique entries, of duplicate slots, and of
// columns.
struct JobSlice {
    int64_t begin, end;
    int64_t first_column, last_column;
    int64_t first_group = 0, last_group = 0;
};

// Applies a job's rule to a slice of it.
using Apply = void (*)(const Job& job, const JobSlice& slice);

// Which elements of a whole tensor those of a part are: its row i is row i * step + first. By
// default the part is the whole. Random bits are those of the whole's elements.
struct RowStride {
    int64_t length = INT64_MAX;  // of a row
    int64_t step = 1, first = 0;

    int64_t element(int64_t here) const {
        return step == 1 ? here : (here / length * step + first) * length + here % length;
    }
    int64_t row(int64_t here) const { return here * step + first; }
};

// A row whose 2-norm is above a limit after its update is rescaled to a norm: max_norm has the two
// the same, normalize has 0 and 1.
struct RowConstraint {
    double norm = 0;  // 0: no constraint
    double above = 0;
};

// A mask over the elements of a parameter, whose state has a value for each kept one: a bit for
// each element, and before each run of words, how many are kept.
constexpr int64_t rank_words = 8;
struct PackedMask {
    const uint64_t* words;
    const int64_t* ranks;
    int64_t numel, kept;
};

// One gradient to apply to one parameter.
struct Job {
    bool all_slots;                  // every slot comes once, in order; no indices
    const int64_t* indices;          // a slot for each entry
    const int64_t* value_index;      // the row of values that each entry takes; null: row i
    TensorView scale;                // a factor for each entry; no data: none
    const bool* element_mask;        // [rows, slot_size]: which elements to update; null: all
    const Entry* unique_entries;     // entries whose slot occurs once; null: all, in order
    const DuplicateSlot* groups;     // the slots that come more than once
    const Entry* duplicate_entries;  // the entries of all groups
    int64_t entries;
    int64_t rows;  // of values; as many as entries where there is no source
    int64_t num_slots;
    int64_t slot_size;
    bool maximize;  // maximize: the gradient is read with the opposite sign
    double
        coupled_decay;  // coupled weight decay: so much of the parameter is added to the gradient
    double decay_factor =
        1;  // decoupled weight decay: the parameter is multiplied by this first; 1: none
    bool stochastic_rounding;  // round half-precision tensors up or down at random
    uint64_t seed;             // of that randomness: one for each parameter and step
    RowStride row_stride;      // where other processes have the other rows
    TensorView values;         // [rows, slot_size]
    // Where values are in several places: all of them. Then `value_index` has the elements between
    // values.data and each entry's row instead of the row's number, and the slot stride is 1.
    const Memory* value_parts;
    int64_t value_part_count;
    TensorView param;
    TensorView state[max_states];            // a number for each element
    TensorView slot_state[max_slot_states];  // a number for each slot
    // Where it has words, state per element has values for kept elements alone. If all_slots is
    // set, the kept elements of parameter and values are a single slot. Otherwise slots are
    // elements, and the state of one is at its rank; or, if expands_state is set, slots of any
    // size, whose state is expanded into tiles.
    PackedMask packed;
    bool expands_state;
    bool has_int8_state;  // the state per element is codes, not `state`
    Int8View int8_state[max_states];
    double options[max_options];  // of the rule, in the order of its formula's arguments
    double step;                  // the number of this update, from 1
    const Program* program;       // where the rule is none of the core's own
    const double* numbers;        // of the program
    Apply apply;
    bool needs_whole_slots;    // the rule or the constraint needs whole slots at a time
    RowConstraint constraint;  // slots are rows where there is one
    Norm order;                // where there is no rule but a norm is asked for
    double* norms;             // of each slot, at the number of its first entry
};

struct RuleKernel {
    const char* name;
    int states;
    int slot_states;
    int options;
    Apply apply;
};

// Coefficients of a Chebyshev series; behind them, a bound on the rest of it.
constexpr int series_terms = 16;

// Rows to catch up; see src/sparsestep/deferred.
struct CatchUpJob {
    const int64_t* rows;  // with repetitions; null: all of them
    int32_t* last;        // for each row the step it has reached; ~step if it never had a gradient
    int32_t initial;      // each entry of ``last`` is xored with it: zero is the initial value
    int32_t now;          // the step that rows are brought to
    int32_t base;         // the step that every row has reached
    int64_t slot_size;
    TensorView param;
    TensorView state[max_states];
    TensorView slot_state[max_slot_states];
    int states, slot_states;
    // For each state, those per slot after those per element, what k steps leave of it, by k;
    // null: all.
    const double* powers[max_states + max_slot_states];
    int buffer, square;                 // numbers of the states that an idle update uses, or -1
    double buffer_decay, square_decay;  // by which they decay in a step
    double eps;
    double max_error;  // of a series, relative to its first term
    bool converges;    // whether there are sums
    int64_t horizon;   // how many of the steps that a row missed matter to it
    // By step since base: 1 / (what weight decay has left), the size of the step's move, what the
    // root of a square is divided by, and the center of the sums.
    const double *inverse_decay, *sizes, *roots, *centers;
    const double* sums;  // by step since base, over all later steps; or the total of sizes
    int64_t sums_per_step;
    double options[max_options];  // of the rule, for an idle update that recomputes
    RowConstraint constraint;     // of each row after each step; then tensors need no conversion
    int64_t single_steps;         // how many of the steps that a row missed may turn it: one by one
};

// Of the rows [begin, end), those that one of several parts owns.
struct CatchUpSlice {
    int64_t begin, end;
    int64_t part, parts;
};

// How many rows were caught up, and of how many the parameter had been stale.
struct CatchUpResult {
    int64_t deferred, stale;
};
using CatchUpKernel = CatchUpResult (*)(const CatchUpJob& work, const CatchUpSlice& share);

struct IdleKernel {
    const char* name;
    CatchUpKernel catch_up;
};

// What the core can do in one type of arithmetic: float, or double where a float64 tensor takes
// part.
struct Kernels {
    const RuleKernel* rules;
    int rule_count;
    const IdleKernel* idle_updates;
    int idle_update_count;
    Apply norms;
};

}  // namespace sparsestep
