// The instruction sets that the core was compiled for, and which of them this machine can run.
#pragma once

#include <vector>

#include "core/types.h"

namespace sparsestep {

#if defined(__x86_64__)
bool has_avx2();
bool has_avx512();  // with the parts that the kernels are compiled for
#endif

struct InstructionSet {
    const char* name;
    bool available;
    KernelTable kernels;
};

// From the plainest to the widest.
const std::vector<InstructionSet>& instruction_sets();

}  // namespace sparsestep
