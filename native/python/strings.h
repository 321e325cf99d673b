// Strings of Python and of Arrow, for their ids. Included by bindings.cpp alone.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/string_hash.h"
#include "python/tensors.h"

namespace sparsestep {
namespace {

// The id of each of some strings of a list or a tuple; the index of the first that is no string or
// has no UTF-8 form, else -1. Holds the GIL, so that no string is freed.
int64_t hash_some(PyObject* strings, int64_t first, std::vector<Bytes>& found, int64_t* ids,
                  int threads) {
    const auto item = PyList_Check(strings) ? &PyList_GetItem : &PyTuple_GetItem;  // borrowed
    constexpr int64_t ahead = 32;
    const int64_t count = int64_t(found.size());
    for (int64_t i = 0; i < count; ++i) {
        if (i + ahead < count) {
            const auto* const next =
                reinterpret_cast<const char*>(item(strings, first + i + ahead));
            __builtin_prefetch(next);
            __builtin_prefetch(next + 64);
        }
        PyObject* const each = item(strings, first + i);
        Py_ssize_t size = 0;
        const char* text = nullptr;
        if (PyUnicode_Check(each)) text = PyUnicode_AsUTF8AndSize(each, &size);
        if (!text) {
            if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
                throw nb::python_error();
            }
            PyErr_Clear();
            return first + i;
        }
        found[size_t(i)] = {text, size_t(size)};
    }
    hash_strings(found.data(), count, ids + first, threads);
    return -1;
}

// The same for all strings of a list or a tuple. Between parts, other threads may run.
int64_t run_hash_strings(nb::object strings, nb::object ids, int threads) {
    PyObject* const given = strings.ptr();
    if (!PyList_Check(given) && !PyTuple_Check(given)) throw nb::type_error("a list or a tuple");
    const int64_t count = numel(ids), part = 1 << 16;
    int64_t* const to = const_cast<int64_t*>(integers(ids));
    std::vector<Bytes> found;
    for (int64_t first = 0; first < count; first += part) {
        found.resize(size_t(std::min(part, count - first)));
        if (int64_t(PySequence_Size(given)) != count) {
            throw nb::value_error("hash_strings: the list has changed while it was read");
        }
        const int64_t bad = hash_some(given, first, found, to, threads);
        if (bad >= 0) return bad;
        nb::gil_scoped_release release;
    }
    return -1;
}

// The memory of an object with Python's buffer protocol.
class BufferView {
public:
    explicit BufferView(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE)) throw nb::python_error();
    }
    ~BufferView() { PyBuffer_Release(&view_); }
    BufferView(const BufferView&) = delete;
    BufferView& operator=(const BufferView&) = delete;

    const char* data() const { return static_cast<const char*>(view_.buf); }
    int64_t bytes() const { return view_.len; }

private:
    Py_buffer view_;
};

bool is_utf8(const Bytes& text) {
    const auto is_ascii = [](char each) { return uint8_t(each) < 0x80; };
    if (std::all_of(text.data, text.data + text.size, is_ascii)) return true;
    PyObject* const decoded = PyUnicode_DecodeUTF8(text.data, Py_ssize_t(text.size), nullptr);
    if (!decoded && !PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) throw nb::python_error();
    Py_XDECREF(decoded);
    PyErr_Clear();
    return decoded;
}

// The same for Arrow's strings: string i is data[offsets[first + i], offsets[first + i + 1]).
template <class Offset>
int64_t hash_arrow(const BufferView& offsets, const BufferView& data, int64_t first, nb::handle ids,
                   int threads) {
    const int64_t count = numel(ids), available = offsets.bytes() / int64_t(sizeof(Offset));
    if (first < 0 || first > available - 1 - count) {
        throw nb::value_error("sparsestep: no such strings");
    }
    std::vector<Bytes> found(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        Offset ends[2];
        std::memcpy(ends, offsets.data() + size_t(first + i) * sizeof(Offset), sizeof(ends));
        if (ends[0] < 0 || ends[0] > ends[1] || int64_t(ends[1]) > data.bytes()) {
            throw nb::value_error("sparsestep: no such strings");
        }
        found[size_t(i)] = {data.data() + ends[0], size_t(ends[1] - ends[0])};
        if (!is_utf8(found[size_t(i)])) return i;
    }
    int64_t* const to = const_cast<int64_t*>(integers(ids));
    nb::gil_scoped_release release;
    hash_strings(found.data(), count, to, threads);
    return -1;
}

int64_t run_hash_arrow(nb::object offsets, bool is_large, nb::object data, int64_t first,
                       nb::object ids, int threads) {
    const BufferView ends(offsets), text(data);
    return is_large ? hash_arrow<int64_t>(ends, text, first, ids, threads)
                    : hash_arrow<int32_t>(ends, text, first, ids, threads);
}

void bind_strings(nb::module_& module) {
    module.def("hash_strings", &run_hash_strings, nb::arg("strings"), nb::arg("ids"),
               nb::arg("threads"), "Write the id of each; the index of one that has none, or -1.");
    module.def("hash_arrow", &run_hash_arrow, nb::arg("offsets"), nb::arg("is_large"),
               nb::arg("data"), nb::arg("first"), nb::arg("ids"), nb::arg("threads"),
               "The same for buffers of Arrow.");
}

}  // namespace
}  // namespace sparsestep
