// Every rule's loop, compiled once per instruction set: CMake sets SPARSESTEP_ISA and the flags.
// The registry of rules is the array below.
#include "kernels.h"

#include "apply.h"
#include "limit.h"
#include "rules/sparse_adam.h"

namespace sparsestep {
namespace {

constexpr RuleKernels rules[] = {
    kernels_of<SparseAdam>(),
};

}  // namespace

#define SPARSESTEP_JOIN_(a, b) a##b
#define SPARSESTEP_JOIN(a, b) SPARSESTEP_JOIN_(a, b)

KernelTable SPARSESTEP_JOIN(kernels_, SPARSESTEP_ISA)() {
    return {rules, int(sizeof(rules) / sizeof(rules[0])), &limit};
}

}  // namespace sparsestep
