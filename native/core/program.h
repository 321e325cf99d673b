// A formula that comes from Python, as the core runs it: a short program over the tiles of a row.
// Plain data, as in types.h. kernels/programs.cpp runs it.
#pragma once

#include <cstdint>

namespace sparsestep {

// src/sparsestep/engines/lowering.py has the same names in the same order.
enum class Code : uint16_t {
    // of two
    add,
    sub,
    mul,
    div,
    maximum,
    minimum,
    pow,
    lt,
    le,
    gt,
    ge,
    eq,
    ne,
    // of one
    neg,
    abs,
    sign,
    sqrt,
    rsqrt,
    reciprocal,
    exp,
    log,
    copy,
    spread,  // a number of the row becomes a tile
    where,
    // What formulas often have one after the other, each operation rounded on its own. Less is then
    // read and written.
    mul_add,       // a * b + c
    mul_sub,       // a * b - c
    sub_mul,       // c - a * b
    mul_mul_add,   // a * b + c * d
    mul_div,       // a * b / c
    sub_div,       // c - a / b
    sub_mul_div,   // d - a * b / c
    sqrt_add,      // sqrt(a) + b
    sqrt_div,      // sqrt(a) / b
    sqrt_div_add,  // sqrt(a) / b + c
    // of a whole row: tiles become a number of the row
    mean,
    sum,
    amax,
};
constexpr int code_count = int(Code::amax) + 1;

// Operands are registers. Those of tiles are numbered: parameter, gradient, states per element,
// the program's numbers, temporaries. Those of rows: states per row, the numbers, temporaries.
struct Instruction {
    Code code;
    uint16_t to, a, b, c, d;
};

constexpr int max_tile_registers = 64;
constexpr int max_row_registers = 128;
constexpr int max_reductions = 8;  // in a phase

// What is done once per row, then for every tile of it. All but the last phase end in numbers of
// the row (mean, sum, amax) and write nothing; the last writes parameter and states.
struct Phase {
    const Instruction *row, *row_end;
    const Instruction *tile, *tile_end;
    uint64_t reads;  // of the registers of tiles, a bit for each
};

struct Program {
    int states, slot_states, numbers;
    const Phase* phases;
    int phase_count;
    const uint16_t* row_results;  // for each state per row, the register that has its new value
};

}  // namespace sparsestep
