// Reading torch's tensors from C++ without torch's headers, so that one binary works with every
// release: through the DLPack table that torch shows, or by the methods that tensors have in
// Python. Included by bindings.cpp alone.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <iterator>
#include <optional>

#include "core/types.h"

namespace sparsestep {
namespace {

namespace nb = nanobind;

// The parts of the DLPack standard (version 1) that are used: a table of functions that a library
// shows on its tensor type, one of which fills in where a tensor lies without a detour over Python.
struct DlTensor {
    void* data;
    int32_t device_type, device_id;
    int32_t dims;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t* shape;
    int64_t* strides;  // in elements
    uint64_t byte_offset;
};
struct DlExchange {
    uint32_t major, minor;
    void* previous;
    void* managed[3];
    int (*tensor)(void* object, DlTensor* to);
    void* stream;
};
constexpr int32_t dl_cpu = 1;
constexpr uint8_t dl_int = 0, dl_float = 2, dl_bfloat = 4;

// The names by which tensors are asked, made once.
struct PythonNames {
    PyObject* indices = PyUnicode_InternFromString("_indices");
    PyObject* values = PyUnicode_InternFromString("_values");
    PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject* dtype = PyUnicode_InternFromString("dtype");
    PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
    PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
    PyObject* grad = PyUnicode_InternFromString("grad");
    PyObject* is_inference = PyUnicode_InternFromString("is_inference");
    PyObject* is_neg = PyUnicode_InternFromString("is_neg");
    PyObject* layout = PyUnicode_InternFromString("layout");
    PyObject* mask = PyUnicode_InternFromString("mask");
    PyObject* numel = PyUnicode_InternFromString("numel");
    PyObject* params = PyUnicode_InternFromString("params");
    PyObject* parts = PyUnicode_InternFromString("parts");
    PyObject* shape = PyUnicode_InternFromString("shape");
    PyObject* step = PyUnicode_InternFromString("step");
    PyObject* version = PyUnicode_InternFromString("_version");
    PyObject* untyped_storage = PyUnicode_InternFromString("untyped_storage");
    PyObject* nbytes = PyUnicode_InternFromString("nbytes");
    PyObject* storage_offset = PyUnicode_InternFromString("storage_offset");
    PyObject* itemsize = PyUnicode_InternFromString("itemsize");
    PyObject* dtypes[std::size(dtype_names)];
    PyObject* int64;
    PyObject* int32;
    PyObject* int8;
    PyObject* strided;
    PyObject* sparse_coo;
    PyObject* tensor;
    PyObject* parameter;
    PyObject* increment_version;
    const DlExchange* exchange = nullptr;  // null: this torch has none

    PythonNames() {
        // Never released: Python's own teardown may come first.
        const nb::object torch = nb::module_::import_("torch");
        for (size_t i = 0; i < std::size(dtype_names); ++i) {
            dtypes[i] = nb::object(torch.attr(dtype_names[i])).release().ptr();
        }
        int64 = nb::object(torch.attr("int64")).release().ptr();
        int32 = nb::object(torch.attr("int32")).release().ptr();
        int8 = nb::object(torch.attr("int8")).release().ptr();
        strided = nb::object(torch.attr("strided")).release().ptr();
        sparse_coo = nb::object(torch.attr("sparse_coo")).release().ptr();
        tensor = nb::object(torch.attr("Tensor")).release().ptr();
        parameter = nb::object(torch.attr("nn").attr("Parameter")).release().ptr();
        increment_version = nb::object(torch.attr("_C").attr("_increment_version")).release().ptr();
        const char* const attribute = "__dlpack_c_exchange_api__";
        if (nb::hasattr(torch.attr("Tensor"), attribute)) {
            const nb::object capsule = torch.attr("Tensor").attr(attribute);
            void* found = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
            if (!found) PyErr_Clear();
            exchange = static_cast<const DlExchange*>(found);
            if (exchange && (exchange->major != 1 || !exchange->tensor)) exchange = nullptr;
        }
    }
};

const PythonNames& names() {
    static const PythonNames made;
    return made;
}

nb::object get(nb::handle object, PyObject* name) {
    return nb::steal(nb::detail::getattr(object.ptr(), name));
}

nb::object call(nb::handle object, PyObject* name) {
    PyObject* arguments[] = {object.ptr()};
    PyObject* result = PyObject_VectorcallMethod(name, arguments, 1, nullptr);
    if (!result) throw nb::python_error();
    return nb::steal(result);
}

bool is_true(nb::handle object, PyObject* method) { return call(object, method).ptr() == Py_True; }

// No subclass: those may have ideas of their own about the methods that are used here.
bool is_plain_tensor(nb::handle object) {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
    return type == names().tensor || type == names().parameter;
}

// The class of src/sparsestep/grads/compact.py, which it tells the core.
PyObject* compact_class = nullptr;
void set_compact_class(nb::object type) { compact_class = type.release().ptr(); }

bool is_compact(nb::handle object) {
    return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == compact_class;
}

int64_t integer(nb::handle object, PyObject* method) {
    return nb::cast<int64_t>(call(object, method));
}

int64_t numel(nb::handle tensor) { return integer(tensor, names().numel); }

// Where `elements` numbers lie, counted from the tensor's first. A tensor's memory may have
// been released, or never allocated: no pointer is used unchecked.
void* address(nb::handle tensor, int64_t elements) {
    const PythonNames& name = names();
    void* const data = reinterpret_cast<void*>(nb::cast<uintptr_t>(call(tensor, name.data_ptr)));
    if (elements <= 0) return data;
    const int64_t bytes = integer(call(tensor, name.untyped_storage), name.nbytes);
    const int64_t item = nb::cast<int64_t>(get(tensor, name.itemsize));
    if (!data || (integer(tensor, name.storage_offset) + elements) * item > bytes) {
        throw nb::value_error("sparsestep: a tensor has less memory than its shape says");
    }
    return data;
}

void* address(nb::handle tensor) { return address(tensor, numel(tensor)); }

// Of a tensor that the library made for itself and shows to no caller.
void* own_address(nb::handle tensor) {
    return reinterpret_cast<void*>(nb::cast<uintptr_t>(call(tensor, names().data_ptr)));
}

// The number of the dtype in Dtype; for any other, the number of dtypes.
int dtype_code(nb::handle tensor) {
    const nb::object dtype = get(tensor, names().dtype);
    int code = 0;
    while (code < int(std::size(dtype_names)) && dtype.ptr() != names().dtypes[code]) ++code;
    return code;
}

// Where the elements of [rows, slot_size] lie: strides in elements.
struct RowLayout {
    void* data;
    int64_t down, across;
};

// The memory of a CPU tensor as [rows, slot_size]; nothing if no two strides describe it.
std::optional<RowLayout> row_layout(nb::handle tensor, int64_t rows, int64_t slot_size) {
    if (is_true(tensor, names().is_contiguous)) {
        if (numel(tensor) != rows * slot_size) throw nb::value_error("a tensor of another size");
        return RowLayout{address(tensor, rows * slot_size), slot_size, 1};
    }
    try {
        const nb::object strides = tensor.attr("view")(rows, slot_size).attr("stride")();
        const int64_t down = nb::cast<int64_t>(strides[0]), across = nb::cast<int64_t>(strides[1]);
        const bool empty = rows <= 0 || slot_size <= 0;
        const int64_t reach = empty ? 0 : (rows - 1) * down + (slot_size - 1) * across + 1;
        return RowLayout{address(tensor, reach), down, across};
    } catch (nb::python_error& error) {
        if (!error.matches(PyExc_RuntimeError)) throw;
        return std::nullopt;
    }
}

// The same as numbers; nothing either if it is elsewhere or of another kind.
std::optional<TensorView> view(nb::handle tensor, int64_t rows, int64_t slot_size) {
    const int code = dtype_code(tensor);
    if (code == 4 || get(tensor, names().is_cpu).ptr() != Py_True) return std::nullopt;
    const std::optional<RowLayout> found = row_layout(tensor, rows, slot_size);
    if (!found) return std::nullopt;
    return TensorView{found->data, Dtype(code), found->down, found->across};
}

// A tensor for the fast path: no subclass, strided, contiguous, on the CPU.
struct PlainTensor {
    DlTensor dl;

    // False for anything else.
    bool read(nb::handle tensor) { return read_rows(tensor) && are_rows_together(); }

    // The same, but there may be gaps between its rows, as in a file with the state between the
    // rows of the table.
    bool read_rows(nb::handle tensor) {
        if (!is_plain_tensor(tensor)) return false;
        if (names().exchange->tensor(tensor.ptr(), &dl)) {
            PyErr_Clear();  // sparse, or anything else that it does not describe
            return false;
        }
        if (dl.device_type != dl_cpu || dl.lanes != 1) return false;
        int64_t stride = 1;
        for (int32_t i = dl.dims; i-- > 0;) {
            const bool fits = i == 0 ? dl.strides[i] >= stride : dl.strides[i] == stride;
            if (dl.shape[i] != 1 && !fits) return false;
            stride *= dl.shape[i];
        }
        return dl.data || stride == 0;  // by now, how many elements it has
    }
    // Elements from the start of a row to the start of the next.
    int64_t row_stride() const { return dl.dims && dl.shape[0] != 1 ? dl.strides[0] : row_size(); }
    int64_t row_size() const {
        int64_t product = 1;
        for (int32_t i = 1; i < dl.dims; ++i) product *= dl.shape[i];
        return product;
    }
    bool are_rows_together() const { return row_stride() == row_size() || numel() == 0; }
    void* data() const { return static_cast<char*>(dl.data) + dl.byte_offset; }
    int64_t numel() const {
        int64_t product = 1;
        for (int32_t i = 0; i < dl.dims; ++i) product *= dl.shape[i];
        return product;
    }
    bool has_shape_of(const PlainTensor& other, int32_t dims) const {
        return dl.dims == dims && std::equal(dl.shape, dl.shape + dims, other.dl.shape);
    }
    bool is_int64() const { return dl.code == dl_int && dl.bits == 64; }
    std::optional<Dtype> dtype() const {
        if (dl.code == dl_bfloat && dl.bits == 16) return Dtype::bfloat16;
        if (dl.code != dl_float) return std::nullopt;
        if (dl.bits == 16) return Dtype::float16;
        if (dl.bits == 32) return Dtype::float32;
        if (dl.bits == 64) return Dtype::float64;
        return std::nullopt;
    }
    // As [slots, slot_size]; nothing if it has another dtype, or rows that lie apart are no slots.
    std::optional<TensorView> view(int64_t slot_size) const {
        const std::optional<Dtype> type = dtype();
        if (!type || (slot_size != row_size() && !are_rows_together())) return std::nullopt;
        return TensorView{data(), *type, slot_size == row_size() ? row_stride() : slot_size, 1};
    }
};

// Whether a step may write a tensor that was read: it is no negative view, autograd allows writes,
// and it has memory for all of its rows.
bool is_writable(nb::handle tensor, const PlainTensor& read) {
    const PythonNames& name = names();
    if (is_true(tensor, name.is_neg) || is_true(tensor, name.is_inference)) return false;
    const int64_t last_row = read.dl.dims ? (read.dl.shape[0] - 1) * read.row_stride() : 0;
    const int64_t end = integer(tensor, name.storage_offset) + last_row + read.row_size();
    return end * (read.dl.bits / 8) <= integer(call(tensor, name.untyped_storage), name.nbytes);
}

// The address of an int64 tensor, or null for None.
const int64_t* integers(nb::handle tensor) {
    if (tensor.is_none()) return nullptr;
    if (get(tensor, names().dtype).ptr() != names().int64) {
        throw nb::value_error("sparsestep: positions must be int64");
    }
    return static_cast<const int64_t*>(address(tensor));
}

}  // namespace
}  // namespace sparsestep
