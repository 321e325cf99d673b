// The usual forms of a gradient, which the core reads itself: COO over rows, compact of one part,
// dense with the rows or elements that a mask selects. gradients/layouts.py knows all forms.
// Included by jobs.h alone.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>
#include <vector>

#include "python/tensors.h"

namespace sparsestep {
namespace {

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

// What the entries of a gradient take, and by which factor; see touched.py.
bool read_factors(nb::handle part, Job& job) {
    const nb::object source = part[4], scale = part[5], held = part[6];
    Plain rows, factors;
    if (!held.is_none()) return false;
    if (!source.is_none()) {
        if (!rows.read(source) || !rows.is_int64() || rows.numel() != job.entries) return false;
        job.source = static_cast<const int64_t*>(rows.data());
    }
    if (!scale.is_none()) {
        if (!factors.read(scale) || factors.numel() != job.entries) return false;
        const auto view = factors.view(1);
        if (!view || is_true(scale, names().is_neg)) return false;
        job.scale = *view;
    }
    return true;
}

// Everything about the gradient of a job, for a parameter of one or more dims that is not empty.
// False for any other form. `alive` gets what the job points to.
bool read_usual(const Plain& param, nb::handle grad, nb::handle selection, Job& job,
                std::vector<nb::object>& alive) {
    const bool selected = !selection.is_none(), compact = is_compact(grad);
    nb::object positions, values, part;
    if (selected) {
        if (!is_strided(grad) || !has_shape(selection[2], param)) return false;
        positions = selection[0];
        values = nb::borrow(grad);
    } else if (compact) {
        const nb::tuple parts = nb::cast<nb::tuple>(get(grad, names().parts));
        if (nb::len(parts) != 1) return false;
        part = parts[0];
        if (nb::len(part) != 7) return false;  // no Touched: still with other processes
        positions = part[0];
        values = part[1];
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
    job.entries = where.numel();
    job.positions = static_cast<const int64_t*>(where.data());
    job.slots = param.dl.shape[0];
    job.rows = job.entries;
    if (selected) {
        job.rows = job.slots = nb::cast<int64_t>(selection[1]);
        job.source = job.positions;
        if (!what.has_shape_of(param, param.dl.dims)) return false;
    } else if (compact) {
        if (nb::cast<int64_t>(part[2]) != job.slots || !read_factors(part, job)) return false;
        if (job.source) job.rows = what.dl.dims ? what.dl.shape[0] : 0;
    } else if (where.dl.dims != 2 || where.dl.shape[0] != 1) {
        return false;
    }
    job.block = param.numel() / job.slots;
    const auto view = what.view(job.block);
    if (!view || what.numel() != job.rows * job.block || is_true(values, names().is_neg)) {
        return false;
    }
    job.values = *view;
    alive.push_back(std::move(positions));
    alive.push_back(std::move(values));
    if (compact) alive.push_back(std::move(part));
    return true;
}

}  // namespace
}  // namespace sparsestep
