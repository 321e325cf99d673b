// A step like the one before, in one call. Included by bindings.cpp alone.
#pragma once

#include <nanobind/nanobind.h>

#include "python/jobs.h"

namespace sparsestep {
namespace {

// Does a whole step where the param groups say what they said and every gradient is in the usual
// form. False, and nothing written, where anything is not so, or a position is no slot: Python's
// side then does the step, or tells what is wrong. `before` has for each group its values and what
// they say, a Group.
bool step_again(int instruction_set, nb::list groups, nb::list before, nb::dict state,
                nb::dict known, int threads) {
    const size_t count = nb::len(before);
    if (nb::len(groups) != count) return false;
    Jobs jobs(instruction_set);
    nb::set seen;
    for (size_t i = 0; i < count; ++i) {
        const nb::object group = groups[i];
        const nb::tuple was = nb::cast<nb::tuple>(before[i]);
        if (!has_values(group, was[0])) return false;
        PyObject* const params = find(group, names().params);
        if (!params || !PyList_CheckExact(params)) return false;
        const Group& says = nb::cast<const Group&>(was[1]);
        if (!jobs.claim_all(says, params, state, known, seen)) return false;
    }
    if (jobs.try_prepare(threads)) return false;
    jobs.commit();
    return true;
}

}  // namespace
}  // namespace sparsestep
