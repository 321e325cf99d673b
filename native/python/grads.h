// Gradients that the core reads without Python's help: COO over rows, the compact gradients of our
// embeddings, dense ones with the rows or elements that a mask selects. gradients/layouts.py knows
// all layouts. Included by bindings.cpp alone.
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

// One lookup of a compact gradient: see touched.py.
struct Part {
    int64_t entries = 0, rows = 0, element_bytes = 0;
    const int64_t* positions = nullptr;
    const int64_t* source = nullptr;  // null: row i
    View values{}, scale{};

    // False for any form but rows of the parameter, as an embedding makes them.
    bool read(nb::handle part, int64_t slots, int64_t block) {
        if (nb::len(part) != 7) return false;  // no IndexedGrad: still with other processes
        if (nb::cast<int64_t>(part[2]) != slots || !part[6].is_none()) return false;
        const nb::object from = part[4], factors = part[5], stored = part[1];
        Plain where, what, numbers, scales;
        if (!where.read(part[0]) || !where.is_int64() || !what.read(stored)) return false;
        rows = entries = where.numel();
        positions = static_cast<const int64_t*>(where.data());
        if (!from.is_none()) {
            if (!numbers.read(from) || !numbers.is_int64() || numbers.numel() != entries) {
                return false;
            }
            source = static_cast<const int64_t*>(numbers.data());
            rows = what.dl.dims ? what.dl.shape[0] : 0;
        }
        if (!factors.is_none()) {
            if (!scales.read(factors) || scales.numel() != entries) return false;
            const auto view = scales.view(1);
            if (!view || is_true(factors, names().is_neg)) return false;
            scale = *view;
        }
        const auto view = what.view(block);
        if (!view || what.numel() != rows * block || is_true(stored, names().is_neg)) return false;
        values = *view;
        element_bytes = what.dl.bits / 8;
        return true;
    }
};

// Memory of several parts put together, for as long as a job points to it.
struct Joined {
    Scratch scratch;
    std::vector<Memory> values;
};

template <class T>
void join_scales(const std::vector<Part>& parts, T* to) {
    for (const Part& part : parts) {
        for (int64_t i = 0; i < part.entries; ++i) {
            *to++ = part.scale.data ? static_cast<const T*>(part.scale.data)[i] : T(1);
        }
    }
}

// Several lookups as one. The rows of values stay where they are; only what is small is copied:
// positions, factors, and where each entry's row begins, in elements from the first part's first.
std::unique_ptr<Joined> join(const std::vector<Part>& parts, int64_t block, Job& job) {
    const int64_t bytes = parts[0].element_bytes;
    View scale{};
    job.entries = 0;
    for (const Part& part : parts) {
        if (part.values.dtype != parts[0].values.dtype) return nullptr;
        if (part.scale.data) {
            if (scale.data && scale.dtype != part.scale.dtype) return nullptr;
            scale = part.scale;
        }
        job.entries += part.entries;
    }
    if (scale.data && scale.dtype != Dtype::float32 && scale.dtype != Dtype::float64)
        return nullptr;
    auto joined = std::make_unique<Joined>();
    const size_t words = size_t(job.entries);
    joined->scratch.reserve((scale.data ? 3 : 2) * words * sizeof(int64_t) + 1);
    int64_t* const positions = static_cast<int64_t*>(joined->scratch.data());
    int64_t *const source = positions + words, *at = source;
    const intptr_t origin = reinterpret_cast<intptr_t>(parts[0].values.data);
    for (const Part& part : parts) {
        std::copy_n(part.positions, part.entries, positions + (at - source));
        // Tensors of one dtype lie a whole number of elements apart.
        const int64_t first =
            (reinterpret_cast<intptr_t>(part.values.data) - origin) / intptr_t(bytes);
        for (int64_t i = 0; i < part.entries; ++i) {
            *at++ = first + (part.source ? part.source[i] : i) * block;
        }
        joined->values.push_back({part.values.data, part.rows * block * bytes});
    }
    if (scale.data) {
        scale.data = source + words;
        if (scale.dtype == Dtype::float32) {
            join_scales(parts, static_cast<float*>(scale.data));
        } else {
            join_scales(parts, static_cast<double*>(scale.data));
        }
        job.scale = scale;
    }
    job.positions = positions;
    job.source = source;
    job.values = parts[0].values;
    job.values.slot_stride = 1;
    job.value_parts = joined->values.data();
    job.value_part_count = int64_t(joined->values.size());
    return joined;
}

// The entries of a job from the parts of a compact gradient. False if the core cannot read them.
bool read_parts(nb::tuple parts, int64_t slots, int64_t block, Job& job,
                std::vector<std::unique_ptr<Joined>>& joined) {
    std::vector<Part> read(nb::len(parts));
    for (size_t i = 0; i < read.size(); ++i) {
        if (!read[i].read(parts[i], slots, block)) return false;
    }
    if (read.empty()) return false;
    if (read.size() > 1) {
        joined.push_back(join(read, block, job));
        return joined.back() != nullptr;
    }
    const Part& only = read[0];
    job.entries = only.entries;
    job.positions = only.positions;
    job.source = only.source;
    job.rows = only.rows;
    job.values = only.values;
    job.scale = only.scale;
    return true;
}

bool has_shape(nb::handle shape, const Plain& param) {
    if (nb::len(shape) != size_t(param.dl.dims)) return false;
    for (int32_t i = 0; i < param.dl.dims; ++i) {
        if (nb::cast<int64_t>(shape[size_t(i)]) != param.dl.shape[i]) return false;
    }
    return true;
}

bool is_strided(nb::handle tensor) {
    return is_plain_tensor(tensor) && get(tensor, names().layout).ptr() == names().strided;
}

// Everything about the gradient of a job, for a parameter of one or more dims that is not empty.
// False for any other form. `alive` and `joined` get what the job points to.
bool read_usual(const Plain& param, nb::handle grad, nb::handle selection, Job& job,
                std::vector<nb::object>& alive, std::vector<std::unique_ptr<Joined>>& joined) {
    job.slots = param.dl.shape[0];
    job.block = param.numel() / job.slots;
    if (selection.is_none() && is_compact(grad)) {
        nb::tuple parts = nb::cast<nb::tuple>(get(grad, names().parts));
        if (!read_parts(parts, job.slots, job.block, job, joined)) return false;
        alive.push_back(std::move(parts));
        return true;
    }
    nb::object positions, values;
    if (!selection.is_none()) {
        if (!is_strided(grad) || !has_shape(selection[2], param)) return false;
        positions = selection[0];
        values = nb::borrow(grad);
    } else {
        if (!is_plain_tensor(grad) || get(grad, names().layout).ptr() != names().sparse_coo ||
            !has_shape(get(grad, names().shape), param)) {
            return false;
        }
        positions = call(grad, names().indices);
        values = call(grad, names().values);
    }
    Plain where, what;
    if (!where.read(positions) || !where.is_int64() || !what.read(values)) return false;
    job.entries = job.rows = where.numel();
    job.positions = static_cast<const int64_t*>(where.data());
    if (!selection.is_none()) {
        job.rows = job.slots = nb::cast<int64_t>(selection[1]);
        job.block = param.numel() / job.slots;
        job.source = job.positions;
        if (!what.has_shape_of(param, param.dl.dims)) return false;
    } else if (where.dl.dims != 2 || where.dl.shape[0] != 1) {
        return false;
    }
    const auto view = what.view(job.block);
    if (!view || what.numel() != job.rows * job.block || is_true(values, names().is_neg)) {
        return false;
    }
    job.values = *view;
    alive.push_back(std::move(positions));
    alive.push_back(std::move(values));
    return true;
}

}  // namespace
}  // namespace sparsestep
