// The instruction sets that the core was compiled for, and which of them this machine can run.
#pragma once

#include <vector>

#include "core/lookup.h"
#include "core/types.h"

namespace sparsestep {

struct InstructionSet {
    const char* name;
    bool available;
    Kernels in_float, in_double;
    Apply program_float, program_double;
    Lookup lookup;
};

// From the plainest to the widest.
const std::vector<InstructionSet>& instruction_sets();

}  // namespace sparsestep
