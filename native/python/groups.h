// What param groups and step counts are to the core. Included by bindings.cpp alone.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "core/dispatch.h"
#include "python/programs.h"
#include "python/tensors.h"

namespace sparsestep {
namespace {

// What a dict has for a key, or null. Looking it up may run Python code, and so raise.
PyObject* find(nb::handle dict, nb::handle key) {
    PyObject* const found = PyDict_GetItemWithError(dict.ptr(), key.ptr());
    if (!found && PyErr_Occurred()) throw nb::python_error();
    return found;
}

bool contains(nb::handle set, nb::handle key) {
    const int found = PySet_Contains(set.ptr(), key.ptr());
    if (found < 0) throw nb::python_error();
    return found == 1;
}

// An int object's value as an address.
bool is_address(nb::handle number, const void* data) {
    const void* const found = PyLong_AsVoidPtr(number.ptr());
    if (!found && PyErr_Occurred()) PyErr_Clear();
    return found == data;
}

// What a param group says about its updates: made once, when Python's side has read the group.
struct Group {
    int rule = -1;             // one of the core's own, or else:
    nb::object program_owner;  // keeps the program
    const Program* program = nullptr;
    int64_t step = 0;  // the one step that the program is for; 0: any
    nb::tuple names;   // of the rule's state: first per element, then per row
    bool counts;       // whether a parameter's state has a step count
    bool negate;       // to maximize
    double l2, shrink;
    std::vector<double> options;  // of the rule, or the numbers of the program
    bool stochastic;              // whether half precision is rounded at random
    std::vector<bool> signs;      // for each state that is codes, whether it has a sign; else none

    Group(int rule, nb::tuple names, bool counts, double sign, double l2, double shrink,
          nb::tuple options, bool stochastic, nb::tuple signs)
        : rule(rule),
          names(names),
          counts(counts),
          negate(sign < 0),
          l2(l2),
          shrink(shrink),
          stochastic(stochastic) {
        const KernelTable table = instruction_sets()[0].kernels;
        if (rule < 0 || rule >= table.count) throw nb::value_error("no such rule");
        const RuleKernels& of = table.rules[rule];
        for (nb::handle each : signs) this->signs.push_back(nb::cast<bool>(each));
        const size_t coded = this->signs.size();  // each has a scale beside it
        if (nb::len(names) != size_t(of.states + of.slot_states) + coded ||
            nb::len(options) != size_t(of.options) || (coded && coded != size_t(of.states))) {
            throw nb::value_error("a rule was given the wrong number of states or options");
        }
        for (nb::handle option : options) this->options.push_back(nb::cast<double>(option));
    }

    Group(nb::object owner, nb::tuple names, int64_t step, double sign, double l2, double shrink,
          nb::tuple numbers, bool stochastic)
        : program_owner(owner),
          program(&nb::cast<const OwnedProgram&>(owner).get()),
          step(step),
          names(names),
          counts(true),
          negate(sign < 0),
          l2(l2),
          shrink(shrink),
          stochastic(stochastic) {
        if (nb::len(names) != size_t(program->states + program->slot_states) ||
            nb::len(numbers) != size_t(program->numbers)) {
            throw nb::value_error("a program was given the wrong number of states or numbers");
        }
        for (nb::handle number : numbers) options.push_back(nb::cast<double>(number));
    }

    RuleKernels kernels(const KernelTable& table) const {
        if (!program) return table.rules[rule];
        return {"program",           program->states,     program->slot_states,
                int(options.size()), table.program_float, table.program_double};
    }

    // The group must outlive the job where it has a program.
    void write_to(Job& job, int64_t step) const {
        job.negate = negate;
        job.l2 = l2;
        job.shrink = shrink;
        job.step = double(step);
        job.program = program;
        job.numbers = options.data();
        if (program) return;
        for (size_t i = 0; i < options.size(); ++i) job.options[i] = options[i];
    }
};

// Whether a dict has these very objects as its values, in this order.
bool has_values(nb::handle dict, nb::handle values) {
    if (!PyDict_Check(dict.ptr()) || nb::len(dict) != nb::len(values)) return false;
    PyObject *key, *value;
    Py_ssize_t next = 0;
    for (Py_ssize_t i = 0; PyDict_Next(dict.ptr(), &next, &key, &value); ++i) {
        if (PyTuple_GET_ITEM(values.ptr(), i) != value) return false;
    }
    return true;
}

// A step count: a Python number, or the one element of a tensor. Owns what it points to.
struct Count {
    nb::object state;   // the dict that holds it
    nb::object tensor;  // the count itself, where it is a tensor
    nb::object next;    // what replaces it, where it is a number
    int64_t value = 0;
    void* data = nullptr;
    Dtype dtype = Dtype::float32;

    // False if it is anything else.
    bool read(nb::handle from) {
        state = nb::borrow(from);
        PyObject* found = find(from, names().step);
        if (!found) return false;
        if (PyLong_CheckExact(found)) {
            value = nb::cast<int64_t>(nb::handle(found));
            next = nb::int_(value + 1);
            return true;
        }
        tensor = nb::borrow(found);
        Plain read;
        if (!read.read(found) || read.dl.dims != 0 || !read.dtype()) return false;
        data = read.data();
        dtype = *read.dtype();
        if (dtype == Dtype::float32) value = int64_t(*static_cast<float*>(data));
        if (dtype == Dtype::float64) value = int64_t(*static_cast<double*>(data));
        return dtype == Dtype::float32 || dtype == Dtype::float64;
    }
    void advance() const {
        if (!data) {
            // Replaces a value that is there: nothing is allocated.
            if (PyDict_SetItem(state.ptr(), names().step, next.ptr())) PyErr_Clear();
        } else if (dtype == Dtype::float32) {
            *static_cast<float*>(data) = float(value + 1);
        } else {
            *static_cast<double*>(data) = double(value + 1);
        }
    }
};

}  // namespace
}  // namespace sparsestep
