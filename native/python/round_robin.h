// Ids for the processes that have their rows: see src/sparsestep/distributed/_packing.py. Included
// by bindings.cpp alone.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "core/round_robin.h"
#include "python/tensors.h"

namespace sparsestep {
namespace {

int64_t* writable(nb::handle tensor, int64_t elements) {
    if (tensor.is_none()) return nullptr;
    if (numel(tensor) < elements) throw nb::value_error("sparsestep: there is too little room");
    return const_cast<int64_t*>(integers(tensor));
}

nb::list as_list(const std::vector<int64_t>& numbers) {
    nb::list found;
    for (int64_t number : numbers) found.append(number);
    return found;
}

// Bags must cover the ids from the first to the last, each beginning where the one before ends.
bool are_bags(const IdBags& from) {
    if (!from.starts) return true;
    return from.starts[0] == 0 && from.starts[from.count] == from.entries &&
           std::is_sorted(from.starts, from.starts + from.count + 1);
}

template <class Row>
nb::tuple split_into(const IdBags& from, int64_t world, Row* rows, int64_t* order, int64_t* bags,
                     int32_t* lengths) {
    RankParts<Row> parts{rows, order, bags, lengths, {}, {}};
    {
        nb::gil_scoped_release release;
        split_by_owner(from, uint64_t(world), parts);
    }
    return nb::make_tuple(as_list(parts.ids_of), as_list(parts.bags_of));
}

// Without numbers of bags, there is a length for each owner and bag.
bool has_lengths(const IdBags& from, int64_t world, nb::handle bags, nb::handle lengths) {
    if (lengths.is_none()) return bags.is_none();
    const bool is_short = nb::cast<int64_t>(get(lengths, names().itemsize)) == 4;
    return is_short && numel(lengths) >= (bags.is_none() ? from.count * world : from.entries);
}

nb::tuple run_split(nb::object ids, nb::object starts, int64_t world, nb::object rows,
                    nb::object order, nb::object bags, nb::object lengths) {
    const int64_t entries = numel(ids);
    const IdBags from{integers(ids), entries, integers(starts),
                      starts.is_none() ? entries : numel(starts) - 1};
    const bool has_room =
        from.count >= 0 && numel(rows) >= entries && has_lengths(from, world, bags, lengths);
    const bool is_int64 = get(rows, names().dtype).ptr() == names().int64;
    if (world < 1 || world > INT32_MAX || !has_room || !are_bags(from) ||
        (!is_int64 && nb::cast<int64_t>(get(rows, names().itemsize)) != 4)) {
        throw nb::value_error("sparsestep: no such bags of ids");
    }
    int64_t *const to = writable(order, entries), *const which = writable(bags, entries);
    int32_t* const sizes = lengths.is_none() ? nullptr : static_cast<int32_t*>(address(lengths));
    void* const data = address(rows);
    if (is_int64) return split_into(from, world, static_cast<int64_t*>(data), to, which, sizes);
    return split_into(from, world, static_cast<int32_t*>(data), to, which, sizes);
}

int64_t run_unique(nb::object ids, int64_t rows, nb::object unique, nb::object which) {
    const int64_t entries = numel(ids);
    const int64_t* const from = integers(ids);
    int64_t *const found = writable(unique, entries), *const each = writable(which, entries);
    if (entries == 0) return 0;
    nb::gil_scoped_release release;
    return find_unique(from, entries, rows, found, each);
}

void bind_round_robin(nb::module_& module) {
    module.def("split_by_owner", &run_split, nb::arg("ids"), nb::arg("starts").none(),
               nb::arg("world"), nb::arg("rows"), nb::arg("order").none(), nb::arg("bags").none(),
               nb::arg("lengths").none(),
               "Sort bags of ids by the owners of their rows; how many ids and bags each gets.");
    module.def("unique", &run_unique, nb::arg("ids"), nb::arg("rows"), nb::arg("unique"),
               nb::arg("which"), "Write out the unique ids; how many, or -1 where one is no row.");
}

}  // namespace
}  // namespace sparsestep
