// What param groups and step counts are to the core. Included by jobs.h alone.
#pragma once

#include <nanobind/nanobind.h>

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

// What the parameters of one group have in common.
struct Group {
    int rule;
    nb::tuple names;    // of the rule's state: first per element, then per row
    bool counts;        // whether a parameter's state has a step count
    nb::tuple numbers;  // sign of the gradient, l2, shrink, options of the rule
    int tag;            // returned with a bad entry

    explicit Group(nb::tuple read)
        : rule(nb::cast<int>(read[0])),
          names(nb::cast<nb::tuple>(read[1])),
          counts(nb::cast<bool>(read[2])),
          numbers(nb::cast<nb::tuple>(read[3])),
          tag(nb::cast<int>(read[4])) {}
};

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
