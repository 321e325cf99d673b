// Compact gradients: what the lookups of a table have left, a part for each. Included by usual.h
// alone.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "core/scratch.h"
#include "python/tensors.h"

namespace sparsestep {
namespace {

// One lookup: see touched.py.
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

}  // namespace
}  // namespace sparsestep
