// Rows of several tensors, overwritten in one call that neither allocates nor fails: see
// src/sparsestep/memory/mapped_file.py. Included by bindings.cpp alone.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "python/tensors.h"

namespace sparsestep {
namespace {

class RowWrites {
public:
    // Overwrite `rows` of a tensor, later. `values` has a row for each, or one for all.
    // False if the tensor is not on the CPU, or the elements of a row are not contiguous.
    bool add(nb::object tensor, nb::object rows, nb::object values) {
        const nb::object shape = get(tensor, names().shape);
        const int64_t count = nb::cast<int64_t>(shape[0]), entries = numel(rows);
        if (get(tensor, names().is_cpu).ptr() != Py_True) return false;
        if (!entries || !numel(tensor)) return true;
        const int64_t slot_size = numel(tensor) / count;
        const int64_t item = nb::cast<int64_t>(get(tensor, names().itemsize));
        const bool is_same = get(tensor, names().dtype).is(get(values, names().dtype));
        const bool is_one = numel(values) == slot_size;
        if (!is_same || (!is_one && numel(values) != entries * slot_size) ||
            !is_true(values, names().is_contiguous)) {
            throw nb::value_error("sparsestep: no such values for rows");
        }
        const int64_t* const which = integers(rows);
        const bool fit = std::all_of(which, which + entries,
                                     [count](int64_t row) { return row >= 0 && row < count; });
        if (!fit) throw nb::value_error("sparsestep: no such rows");
        const std::optional<RowLayout> place_of = row_layout(tensor, count, slot_size);
        if (!place_of || (slot_size > 1 && place_of->across != 1)) return false;
        writes_.push_back({static_cast<char*>(place_of->data),
                           static_cast<const char*>(address(values)), which, entries,
                           place_of->down * item, size_t(slot_size * item),
                           is_one ? 0 : slot_size * item});
        kept_.append(nb::make_tuple(tensor, rows, values));
        return true;
    }

    void commit() const noexcept {
        for (const Write& write : writes_) {
            const char* from = write.from;
            for (int64_t i = 0; i < write.count; ++i, from += write.step) {
                std::memcpy(write.to + write.rows[i] * write.stride, from, write.bytes);
            }
        }
    }

private:
    struct Write {
        char* to;
        const char* from;
        const int64_t* rows;
        int64_t count, stride;  // stride and step in bytes
        size_t bytes;           // of a row
        int64_t step;           // from one row of values to the next
    };
    std::vector<Write> writes_;
    nb::list kept_;  // tensors that must outlive this object
};

void bind_row_writes(nb::module_& module) {
    nb::class_<RowWrites>(module, "RowWrites", "Rows of tensors that are overwritten together.")
        .def(nb::init<>())
        .def("add", &RowWrites::add, nb::arg("tensor"), nb::arg("rows"), nb::arg("values"),
             "Add rows of a tensor; false if this tensor cannot be written here.")
        .def("commit", &RowWrites::commit, "Write all of them; neither allocates nor fails.");
}

}  // namespace
}  // namespace sparsestep
