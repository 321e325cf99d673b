// A step like the one before, in one call. Included by bindings.cpp alone.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "python/step.h"

namespace sparsestep {
namespace {

// What the masks of a group select, for each of its parameters. `masked` has for each parameter
// itself and None, or its mask, the mask's version when it was looked at, and what it selected
// then. False where a parameter or a mask is another now, or a mask has changed.
bool read_masks(nb::handle group, nb::handle params, nb::handle masked,
                std::vector<nb::object>& selections) {
    PyObject* const given = find(group, names().mask);
    const size_t count = nb::len(masked);
    if (!given || nb::len(params) != count) return false;
    const bool listed = PyList_CheckExact(given) || PyTuple_CheckExact(given);
    if (listed ? nb::len(given) != count : count != 1) return false;
    for (size_t i = 0; i < count; ++i) {
        const nb::tuple one = nb::cast<nb::tuple>(masked[i]);
        const nb::object param = params[i];
        const nb::object mask = listed ? nb::object(nb::handle(given)[i]) : nb::borrow(given);
        if (param.ptr() != one[0].ptr() || mask.ptr() != one[1].ptr()) return false;
        if (!mask.is_none() && !get(mask, names().version).equal(one[2])) return false;
        selections.push_back(one[3]);
    }
    return true;
}

// Does a whole step where the param groups say what they said and every gradient is in the usual
// form. False, and nothing written, where anything is not so, or a position is no slot: Python's
// side then does the step, or tells what is wrong. `before` has for each group its values, what
// they say, a Group, and what its masks select, if it has any (see read_masks).
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
        std::vector<nb::object> selections;
        if (!was[2].is_none() && !read_masks(group, params, was[2], selections)) return false;
        if (!jobs.claim_all(says, params, state, known, seen, selections)) return false;
    }
    if (jobs.try_prepare(threads)) return false;
    jobs.commit();
    return true;
}

}  // namespace
}  // namespace sparsestep
