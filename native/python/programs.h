// Programs as Python's side hands them over: every register is looked at before the core trusts it.
// Included by groups.h alone.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <vector>

#include "core/program.h"
#include "core/types.h"

namespace sparsestep {
namespace {

namespace nb = nanobind;

// A Program and what it points to. `phases` has two bytes objects for each: six 16-bit numbers for
// each instruction, those of the row and those of its tiles.
class OwnedProgram {
public:
    OwnedProgram(int states, int slot_states, int numbers, nb::tuple phases, nb::bytes row_results)
        : row_results_(numbers_in<uint16_t>(row_results)) {
        program_ = {states, slot_states, numbers, nullptr, int(nb::len(phases)), nullptr};
        if (states < 0 || states > max_states || slot_states < 0 || slot_states > max_slot_states ||
            numbers < 0 || numbers > max_tile_registers || nb::len(phases) == 0 ||
            row_results_.size() != size_t(slot_states)) {
            refuse();
        }
        for (uint16_t r : row_results_) check(r < max_row_registers);
        instructions_.reserve(2 * nb::len(phases));
        for (nb::handle phase : phases) {
            const bool last = phases_.size() + 1 == nb::len(phases);
            instructions_.push_back(numbers_in<Instruction>(nb::cast<nb::bytes>(phase[0])));
            const auto& row = instructions_.back();
            instructions_.push_back(numbers_in<Instruction>(nb::cast<nb::bytes>(phase[1])));
            const auto& tile = instructions_.back();
            check_row(row);
            phases_.push_back({row.data(), row.data() + row.size(), tile.data(),
                               tile.data() + tile.size(), check_tile(tile, last)});
        }
        program_.phases = phases_.data();
        program_.row_results = row_results_.data();
    }
    OwnedProgram(const OwnedProgram&) = delete;

    const Program& get() const { return program_; }

private:
    [[noreturn]] static void refuse() { throw nb::value_error("no such program"); }
    static void check(bool holds) {
        if (!holds) refuse();
    }

    template <class T>
    static std::vector<T> numbers_in(const nb::bytes& bytes) {
        static_assert(std::is_trivially_copyable_v<T>, "its bytes are all there is to it");
        check(bytes.size() % sizeof(T) == 0);
        std::vector<T> found(bytes.size() / sizeof(T));
        if (!found.empty()) std::memcpy(found.data(), bytes.c_str(), bytes.size());
        return found;
    }

    // Operations on the row's numbers, then tiles that are filled with some of them.
    void check_row(const std::vector<Instruction>& row) const {
        bool spreading = false;
        for (const Instruction& each : row) {
            check(int(each.code) < code_count && each.code < Code::mean);
            check(each.a < max_row_registers && each.b < max_row_registers &&
                  each.c < max_row_registers && each.d < max_row_registers);
            const bool spread = each.code == Code::spread;
            check(spread || !spreading);
            spreading = spread;
            const int first = program_.numbers + (spread ? 2 + program_.states : 0);
            const int end = spread ? max_tile_registers : max_row_registers;
            check(each.to >= first + (spread ? 0 : program_.slot_states) && each.to < end);
        }
    }

    // Operations on tiles; but in the last phase, then those that make numbers of the row.
    uint64_t check_tile(const std::vector<Instruction>& tile, bool last) const {
        int reductions = 0;
        uint64_t reads = 0;
        for (const Instruction& each : tile) {
            check(int(each.code) < code_count && each.code != Code::spread);
            check(each.a < max_tile_registers && each.b < max_tile_registers &&
                  each.c < max_tile_registers && each.d < max_tile_registers);
            for (int r : {each.a, each.b, each.c, each.d}) reads |= uint64_t(1) << r;
            const bool reduces = each.code >= Code::mean;
            check(reduces || !reductions);
            if (reduces) {
                check(!last && ++reductions <= max_reductions && each.to < max_row_registers &&
                      each.to >= program_.slot_states + program_.numbers);
            } else if (each.to < 2 + program_.states) {
                check(last && each.to != 1);
            } else {
                check(each.to >= 2 + program_.states + program_.numbers &&
                      each.to < max_tile_registers);
            }
        }
        return reads;
    }

    Program program_;
    std::vector<Phase> phases_;
    std::vector<std::vector<Instruction>> instructions_;
    std::vector<uint16_t> row_results_;
};

}  // namespace
}  // namespace sparsestep
