// Gradients that the core reads without Python's help: COO over rows, the compact gradients of our
// embeddings, dense ones, with the rows or elements that a mask selects or all. grads/layouts.py
// knows all layouts. Included by bindings.cpp alone.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "core/memory.h"
#include "python/tensors.h"

namespace sparsestep {
namespace {

// One lookup of a compact gradient: see grads/indexed.py.
struct GradPart {
    int64_t entries = 0, rows = 0, element_bytes = 0;
    const int64_t* indices = nullptr;
    const int64_t* value_index = nullptr;  // null: row i
    TensorView values{}, scale{};

    // False for any form but rows of the parameter, as an embedding makes them.
    bool read(nb::handle part, int64_t num_slots, int64_t slot_size) {
        if (nb::len(part) != 7) return false;  // no IndexedGrad: still with other processes
        if (nb::cast<int64_t>(part[2]) != num_slots || !part[6].is_none()) return false;
        const nb::object from = part[4], factors = part[5], stored = part[1];
        PlainTensor where, what, numbers, scales;
        if (!where.read(part[0]) || !where.is_int64() || !what.read(stored)) return false;
        rows = entries = where.numel();
        indices = static_cast<const int64_t*>(where.data());
        if (!from.is_none()) {
            if (!numbers.read(from) || !numbers.is_int64() || numbers.numel() != entries) {
                return false;
            }
            value_index = static_cast<const int64_t*>(numbers.data());
            rows = what.dl.dims ? what.dl.shape[0] : 0;
        }
        if (!factors.is_none()) {
            if (!scales.read(factors) || scales.numel() != entries) return false;
            const auto view = scales.view(1);
            if (!view || is_true(factors, names().is_neg)) return false;
            scale = *view;
        }
        const auto view = what.view(slot_size);
        if (!view || what.numel() != rows * slot_size || is_true(stored, names().is_neg))
            return false;
        values = *view;
        element_bytes = what.dl.bits / 8;
        return true;
    }
};

// Memory of several parts put together, for as long as a job points to it.
struct JoinedParts {
    Scratch scratch;
    std::vector<Memory> values;
};

template <class T>
void join_scales(const std::vector<GradPart>& parts, T* to) {
    for (const GradPart& part : parts) {
        for (int64_t i = 0; i < part.entries; ++i) {
            *to++ = part.scale.data ? static_cast<const T*>(part.scale.data)[i] : T(1);
        }
    }
}

// Several lookups as one. The values are not copied, only small arrays: indices, factors, and the
// offset of each entry's row, in elements from the first element of the first part.
std::unique_ptr<JoinedParts> join(const std::vector<GradPart>& parts, int64_t slot_size, Job& job) {
    const int64_t bytes = parts[0].element_bytes;
    TensorView scale{};
    job.entries = 0;
    for (const GradPart& part : parts) {
        if (part.values.dtype != parts[0].values.dtype) return nullptr;
        if (part.scale.data) {
            if (scale.data && scale.dtype != part.scale.dtype) return nullptr;
            scale = part.scale;
        }
        job.entries += part.entries;
    }
    if (scale.data && scale.dtype != Dtype::float32 && scale.dtype != Dtype::float64)
        return nullptr;
    auto joined = std::make_unique<JoinedParts>();
    const size_t words = size_t(job.entries);
    joined->scratch.reserve((scale.data ? 3 : 2) * words * sizeof(int64_t) + 1);
    int64_t* const indices = static_cast<int64_t*>(joined->scratch.data());
    int64_t *const value_index = indices + words, *at = value_index;
    const intptr_t origin = reinterpret_cast<intptr_t>(parts[0].values.data);
    for (const GradPart& part : parts) {
        std::copy_n(part.indices, part.entries, indices + (at - value_index));
        // Tensors of one dtype lie a whole number of elements apart.
        const int64_t first =
            (reinterpret_cast<intptr_t>(part.values.data) - origin) / intptr_t(bytes);
        for (int64_t i = 0; i < part.entries; ++i) {
            *at++ = first + (part.value_index ? part.value_index[i] : i) * slot_size;
        }
        joined->values.push_back({part.values.data, part.rows * slot_size * bytes});
    }
    if (scale.data) {
        scale.data = value_index + words;
        if (scale.dtype == Dtype::float32) {
            join_scales(parts, static_cast<float*>(scale.data));
        } else {
            join_scales(parts, static_cast<double*>(scale.data));
        }
        job.scale = scale;
    }
    job.indices = indices;
    job.value_index = value_index;
    job.values = parts[0].values;
    job.values.slot_stride = 1;
    job.value_parts = joined->values.data();
    job.value_part_count = int64_t(joined->values.size());
    return joined;
}

// The entries of a job from the parts of a compact gradient. False if the core cannot read them.
bool read_parts(nb::tuple parts, int64_t num_slots, int64_t slot_size, Job& job,
                std::vector<std::unique_ptr<JoinedParts>>& joined) {
    std::vector<GradPart> read(nb::len(parts));
    for (size_t i = 0; i < read.size(); ++i) {
        if (!read[i].read(parts[i], num_slots, slot_size)) return false;
    }
    if (read.empty()) return false;
    if (read.size() > 1) {
        joined.push_back(join(read, slot_size, job));
        return joined.back() != nullptr;
    }
    const GradPart& only = read[0];
    job.entries = only.entries;
    job.indices = only.indices;
    job.value_index = only.value_index;
    job.rows = only.rows;
    job.values = only.values;
    job.scale = only.scale;
    return true;
}

bool has_shape(nb::handle shape, const PlainTensor& param) {
    if (nb::len(shape) != size_t(param.dl.dims)) return false;
    for (int32_t i = 0; i < param.dl.dims; ++i) {
        if (nb::cast<int64_t>(shape[size_t(i)]) != param.dl.shape[i]) return false;
    }
    return true;
}

bool is_strided(nb::handle tensor) {
    return is_plain_tensor(tensor) && get(tensor, names().layout).ptr() == names().strided;
}

// Whether an IndexedGrad field that defaults to None has a value.
bool is_default_or(nb::handle field, int64_t value) {
    return field.is_none() || (PyLong_CheckExact(field.ptr()) && nb::int_(value).equal(field));
}

// Indices and values of a gradient whose slots are the rows of the parameter. False for an
// IndexedGrad of any other form.
bool read_row_slots(nb::handle grad, const Job& job, nb::object& indices, nb::object& values) {
    if (nb::len(grad) != 7 || !grad[4].is_none() || !grad[5].is_none() || !grad[6].is_none() ||
        grad[2].is_none() != grad[3].is_none() || !is_default_or(grad[2], job.num_slots) ||
        !is_default_or(grad[3], job.slot_size)) {
        return false;
    }
    indices = grad[0];
    values = grad[1];
    return true;
}

// How the core reads a dense gradient without a mask: not at all, as one slot, or row by row.
enum class DenseSlots { none, one, rows };

bool read_dense_grad(const PlainTensor& param, nb::handle grad, DenseSlots slots, Job& job) {
    PlainTensor what;
    if (slots == DenseSlots::none || !what.read(grad) || is_true(grad, names().is_neg) ||
        !what.has_shape_of(param, param.dl.dims)) {
        return false;
    }
    // Where rows lie apart, nothing longer has one stride.
    const bool by_row = slots == DenseSlots::rows || !param.are_rows_together();
    job.all_slots = true;
    job.num_slots = job.entries = job.rows = by_row && param.dl.dims ? param.dl.shape[0] : 1;
    job.slot_size = param.numel() / job.num_slots;
    const auto view = what.view(job.slot_size);
    if (!view) return false;
    job.values = *view;
    return true;
}

// A mask over the elements of a parameter, as PackedMask.native in grads/masks.py has it.
void read_packed(nb::handle from, int64_t numel_of_param, PackedMask& to) {
    to.words = reinterpret_cast<const uint64_t*>(integers(from[0]));
    to.ranks = integers(from[1]);
    to.kept = nb::cast<int64_t>(from[2]);
    to.numel = numel_of_param;
    const int64_t words = (to.numel + 63) / 64;
    if (numel(from[0]) != words || numel(from[1]) != (words + rank_words - 1) / rank_words) {
        throw nb::value_error("no such mask");
    }
}

// A dense gradient, of which a mask keeps elements. False for any other form.
bool read_masked_grad(const PlainTensor& param, nb::handle grad, nb::handle selection, Job& job) {
    if (!is_strided(grad) || !has_shape(selection[3], param) || !param.are_rows_together() ||
        !read_dense_grad(param, grad, DenseSlots::one, job)) {
        return false;
    }
    read_packed(selection, param.numel(), job.packed);
    job.slot_size = job.packed.kept;
    return job.packed.kept > 0;
}

// Everything about the gradient of a job, for a parameter that is not empty. False for any other
// form. `alive` and `joined` get what the job points to; `indices` the tensor of indices, the parts
// of a compact gradient, or None for a dense one.
bool read_standard_grad(const PlainTensor& param, nb::handle grad, nb::handle selection,
                        DenseSlots dense, Job& job, nb::object& indices,
                        std::vector<nb::object>& alive,
                        std::vector<std::unique_ptr<JoinedParts>>& joined) {
    if (selection.is_none() && is_strided(grad)) {
        if (!read_dense_grad(param, grad, dense, job)) return false;
        alive.push_back(nb::borrow(grad));
        indices = nb::none();
        return true;
    }
    if (!selection.is_none() && nb::len(selection) == 4) {
        if (!read_masked_grad(param, grad, selection, job)) return false;
        alive.push_back(nb::borrow(grad));
        alive.push_back(nb::borrow(selection));
        indices = nb::none();
        return true;
    }
    if (param.dl.dims == 0) return false;
    job.num_slots = param.dl.shape[0];
    job.slot_size = param.numel() / job.num_slots;
    if (selection.is_none() && is_compact(grad)) {
        nb::tuple parts = nb::cast<nb::tuple>(get(grad, names().parts));
        if (!read_parts(parts, job.num_slots, job.slot_size, job, joined)) return false;
        alive.push_back(parts);
        indices = std::move(parts);
        return true;
    }
    nb::object values;
    if (!selection.is_none()) {
        if (!is_strided(grad) || !has_shape(selection[2], param)) return false;
        indices = selection[0];
        values = nb::borrow(grad);
    } else if (PyTuple_Check(grad.ptr())) {
        if (!read_row_slots(grad, job, indices, values)) return false;
    } else {
        if (!is_plain_tensor(grad) || get(grad, names().layout).ptr() != names().sparse_coo ||
            !has_shape(get(grad, names().shape), param)) {
            return false;
        }
        indices = call(grad, names().indices);
        values = call(grad, names().values);
    }
    PlainTensor where, what;
    if (!where.read(indices) || !where.is_int64() || !what.read(values)) return false;
    job.entries = job.rows = where.numel();
    job.indices = static_cast<const int64_t*>(where.data());
    if (!selection.is_none()) {
        job.rows = job.num_slots = nb::cast<int64_t>(selection[1]);
        job.slot_size = param.numel() / job.num_slots;
        job.value_index = job.indices;
        if (!what.has_shape_of(param, param.dl.dims)) return false;
    } else if (!PyTuple_Check(grad.ptr()) && (where.dl.dims != 2 || where.dl.shape[0] != 1)) {
        return false;
    }
    const auto view = what.view(job.slot_size);
    if (!view || what.numel() != job.rows * job.slot_size || is_true(values, names().is_neg)) {
        return false;
    }
    job.values = *view;
    alive.push_back(indices);
    alive.push_back(std::move(values));
    return true;
}

}  // namespace
}  // namespace sparsestep
