// The instruction sets the core was compiled for, and which of them this machine can run.
#pragma once

#include <vector>

#include "core/types.h"

namespace sparsestep {

struct InstructionSet {
    const char* name;
    bool available;
    KernelTable kernels;
};

// From the plainest to the widest.
const std::vector<InstructionSet>& instruction_sets();

}  // namespace sparsestep
