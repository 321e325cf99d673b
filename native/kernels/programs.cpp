// The loop for rules that come from Python, compiled once per instruction set as kernels.cpp is.
#include "kernels/kernels.h"
#include "kernels/program.h"

namespace sparsestep {

ProgramKernels SPARSESTEP_JOIN(programs_, SPARSESTEP_ISA)() {
    return {&apply_program<float>, &apply_program<double>};
}

}  // namespace sparsestep
