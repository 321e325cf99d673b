// Rows of tables in files: see src/sparsestep/memory/mapped_file.py. Included by bindings.cpp
// alone.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>

#include "core/mapped_file.h"
#include "core/memory.h"
#include "python/tensors.h"

namespace sparsestep {
namespace {

// The bytes of a map, one for each row or page; of a tensor that Python's side has made.
uint8_t* map_of(nb::handle tensor, int64_t size) {
    if (numel(tensor) < size || nb::cast<int64_t>(get(tensor, names().itemsize)) != 1) {
        throw nb::value_error("sparsestep: a map must have a byte for each row or page");
    }
    return static_cast<uint8_t*>(own_address(tensor));
}

FileRows rows_in_file(nb::handle rows, int64_t count, int64_t row_bytes, int64_t offset,
                      int64_t page_bytes) {
    if (count < 0 || row_bytes < 1 || offset < 0 || page_bytes < 1) {
        throw nb::value_error("sparsestep: no such rows");
    }
    return {integers(rows), numel(rows), count, row_bytes, offset, page_bytes};
}

int run_reserve_rows(nb::object rows, int64_t count, int64_t row_bytes, int64_t offset,
                     int64_t page_bytes, int file, nb::object known, int threads) {
    const FileRows of = rows_in_file(rows, count, row_bytes, offset, page_bytes);
    uint8_t* const map = map_of(known, pages_of(of));
    nb::gil_scoped_release release;
    return reserve_rows(of, file, map, threads);
}

int64_t run_prefetch_rows(nb::object rows, int64_t count, int64_t row_bytes, int64_t offset,
                          int64_t page_bytes, uintptr_t memory, nb::object known) {
    const FileRows of = rows_in_file(rows, count, row_bytes, offset, page_bytes);
    uint8_t* const map = map_of(known, pages_of(of));
    nb::gil_scoped_release release;
    return prefetch_rows(of, reinterpret_cast<char*>(memory), map);
}

void run_mark_rows(nb::object rows, nb::object marks) {
    const int64_t *const from = integers(rows), entries = numel(rows), count = numel(marks);
    uint8_t* const to = map_of(marks, count);
    nb::gil_scoped_release release;
    mark_rows(from, entries, count, to);
}

// Bytes that are zero and take memory when they are touched.
nb::ndarray<nb::pytorch, uint8_t, nb::ndim<1>> lazy_zeros(size_t bytes) {
    auto memory = std::make_unique<LazyState>(bytes);
    void* const data = memory->data();
    nb::capsule owner(memory.release(),
                      [](void* p) noexcept { delete static_cast<LazyState*>(p); });
    return {data, {bytes}, owner};
}

void bind_storage(nb::module_& module) {
    module.def("lazy_zeros", &lazy_zeros, nb::arg("bytes"),
               "A tensor of zeros that take memory when they are touched.");
    module.def("reserve_rows", &run_reserve_rows, nb::arg("rows"), nb::arg("count"),
               nb::arg("row_bytes"), nb::arg("offset"), nb::arg("page_bytes"), nb::arg("file"),
               nb::arg("known"), nb::arg("threads"),
               "Have blocks of a file held ready for rows; an errno, or 0.");
    module.def("prefetch_rows", &run_prefetch_rows, nb::arg("rows"), nb::arg("count"),
               nb::arg("row_bytes"), nb::arg("offset"), nb::arg("page_bytes"), nb::arg("memory"),
               nb::arg("known"), "Have rows of a mapped file read; how many pages were asked for.");
    module.def("mark_rows", &run_mark_rows, nb::arg("rows"), nb::arg("marks"),
               "Set the bytes of these rows.");
}

}  // namespace
}  // namespace sparsestep
