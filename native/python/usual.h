// The usual forms of a gradient, which the core reads itself: COO over rows, compact, dense with
// the rows or elements that a mask selects. gradients/layouts.py knows all forms.
// Included by jobs.h alone.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>
#include <vector>

#include "python/grads.h"
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
