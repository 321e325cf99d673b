// Ids for the processes that have their rows, and messages: see src/sparsestep/distributed.
// Included by bindings.cpp alone.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "core/messages.h"
#include "core/round_robin.h"
#include "core/wire.h"
#include "python/lookup.h"
#include "python/tensors.h"

namespace sparsestep {
namespace {

int64_t* writable(nb::handle tensor, int64_t elements) {
    if (tensor.is_none()) return nullptr;
    if (numel(tensor) < elements) throw nb::value_error("sparsestep: there is too little room");
    return const_cast<int64_t*>(integers(tensor));
}

// Bags must cover the ids from the first to the last, each beginning where the one before ends.
bool are_bags(const IdBags& from) {
    if (!from.starts) return true;
    return from.starts[0] == 0 && from.starts[from.count] == from.entries &&
           std::is_sorted(from.starts, from.starts + from.count + 1);
}

template <class Row>
void split_into(const IdBags& from, int64_t world, Row* rows, int64_t* order, int64_t* bags,
                int32_t* lengths, int64_t* counts) {
    nb::gil_scoped_release release;
    RankParts<Row> parts{rows, order, bags, lengths, {}, {}};
    split_by_owner(from, uint64_t(world), parts);
    counts = std::copy(parts.ids_of.begin(), parts.ids_of.end(), counts);
    std::copy(parts.bags_of.begin(), parts.bags_of.end(), counts);
}

// Without numbers of bags, there is a length for each owner and bag.
bool has_lengths(const IdBags& from, int64_t world, nb::handle bags, nb::handle lengths) {
    if (lengths.is_none()) return bags.is_none();
    const bool is_short = nb::cast<int64_t>(get(lengths, names().itemsize)) == 4;
    return is_short && numel(lengths) >= (bags.is_none() ? from.count * world : from.entries);
}

void run_split(nb::object ids, nb::object starts, int64_t world, nb::object rows, nb::object order,
               nb::object bags, nb::object lengths, nb::object counts) {
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
    int64_t* const of_ranks = writable(counts, 2 * world);
    void* const data = address(rows);
    if (is_int64) {
        split_into(from, world, static_cast<int64_t*>(data), to, which, sizes, of_ranks);
    } else {
        split_into(from, world, static_cast<int32_t*>(data), to, which, sizes, of_ranks);
    }
}

int64_t run_unique(nb::object ids, int64_t rows, nb::object unique, nb::object which) {
    const int64_t entries = numel(ids);
    const int64_t* const from = integers(ids);
    int64_t *const found = writable(unique, entries), *const each = writable(which, entries);
    if (entries == 0) return 0;
    nb::gil_scoped_release release;
    return find_unique(from, entries, rows, found, each);
}

// The distinct ids of one table as their owners number them, and the row that each id gets. The ids
// of a whole table all go to its owner; those of round-robin rows are sorted by owner (-1).
template <class Row>
int64_t request_rows(const std::vector<int64_t>& ids, int64_t rows, int64_t world, int64_t owner,
                     Row* to, int64_t* inverse, int64_t* counts) {
    const int64_t entries = int64_t(ids.size());
    std::vector<int64_t> distinct(ids.size());
    const int64_t found = find_unique(ids.data(), entries, rows, distinct.data(), inverse);
    if (found < 0) return -1;
    std::fill(counts, counts + world, 0);
    if (owner >= 0) {
        std::copy(distinct.begin(), distinct.begin() + found, to);
        counts[owner] = found;
        return found;
    }
    const size_t size = size_t(found);
    std::vector<int64_t> order(size), position(size);
    RankParts<Row> parts{to, order.data(), nullptr, nullptr, {}, {}};
    split_by_owner(IdBags{distinct.data(), found, nullptr, found}, uint64_t(world), parts);
    std::copy(parts.ids_of.begin(), parts.ids_of.end(), counts);
    for (int64_t i = 0; i < found; ++i) position[size_t(order[size_t(i)])] = i;
    for (int64_t e = 0; e < entries; ++e) inverse[e] = position[size_t(inverse[e])];
    return found;
}

// For each table (ids, rows, owner or -1): the ids to request and the row that each id gets. None,
// where anything is unusual or wrong; counts have a row for each table.
nb::object run_request_rows(nb::list tables, int64_t world, nb::object counts) {
    const size_t count = nb::len(tables);
    int64_t* to = writable(counts, int64_t(count) * world);
    if (!names().exchange || world < 1 || world > INT32_MAX) return nb::none();
    nb::list found;
    for (nb::handle table : tables) {
        const nb::tuple asked = nb::cast<nb::tuple>(table);
        PlainTensor tensor;
        Integers read{};
        const int64_t rows = nb::cast<int64_t>(asked[1]), owner = nb::cast<int64_t>(asked[2]);
        if (!read_integers(asked[0], tensor, read) || owner >= world) return nb::none();
        const int64_t entries = tensor.numel();
        std::vector<int64_t> ids(static_cast<size_t>(entries));
        if (read.is_short) {
            std::copy_n(static_cast<const int32_t*>(read.data), entries, ids.begin());
        } else {
            std::copy_n(static_cast<const int64_t*>(read.data), entries, ids.begin());
        }
        const bool is_short = (owner < 0 ? (rows + world - 1) / world : rows) <= INT32_MAX;
        nb::object requested = nb::none(), inverse = nb::none();
        int64_t *which = nullptr, *long_ids = nullptr, number = 0;
        int32_t* short_ids = nullptr;
        const nb::tuple shape = nb::make_tuple(entries);
        if (!make_tensor(inverse, shape, names().int64, which)) return nb::none();
        const bool is_made = is_short ? make_tensor(requested, shape, names().int32, short_ids)
                                      : make_tensor(requested, shape, names().int64, long_ids);
        if (!is_made) return nb::none();
        if (entries == 0) {
            std::fill(to, to + world, 0);
        } else if (is_short) {
            number = request_rows(ids, rows, world, owner, short_ids, which, to);
        } else {
            number = request_rows(ids, rows, world, owner, long_ids, which, to);
        }
        if (number < 0) return nb::none();
        if (number < entries) requested = requested.attr("narrow")(0, 0, number);
        found.append(nb::make_tuple(requested, inverse));
        to += world;
    }
    return found;
}

// Adds rows of float32 or float64 to rows of zeros, in their order: (rows, index, sums) each.
bool run_sum_rows(nb::list tables) {
    struct Sum {
        PlainTensor rows, index, sums;
    };
    std::vector<Sum> all;
    for (nb::handle table : tables) {
        const nb::tuple asked = nb::cast<nb::tuple>(table);
        Sum each;
        if (!each.rows.read(asked[0]) || !each.index.read(asked[1]) || !each.sums.read(asked[2])) {
            return false;
        }
        const auto dtype = each.rows.dtype();
        const bool is_known = dtype == Dtype::float32 || dtype == Dtype::float64;
        const bool fits = each.rows.dl.dims == 2 && each.sums.dl.dims == 2 &&
                          each.rows.dl.shape[1] == each.sums.dl.shape[1] &&
                          each.index.numel() == each.rows.dl.shape[0] && each.index.is_int64();
        if (!is_known || !fits || each.sums.dtype() != dtype) return false;
        const int64_t* const to = static_cast<const int64_t*>(each.index.data());
        const int64_t most = each.sums.dl.shape[0];
        const auto is_row = [&](int64_t row) { return row >= 0 && row < most; };
        if (!std::all_of(to, to + each.index.numel(), is_row)) return false;
        all.push_back(each);
    }
    const auto add = [](const Sum& each, auto* sums) {
        const auto* from = static_cast<const decltype(sums)>(each.rows.data());
        const int64_t* const to = static_cast<const int64_t*>(each.index.data());
        const int64_t columns = each.rows.dl.shape[1];
        for (int64_t e = 0; e < each.index.numel(); ++e) {
            for (int64_t c = 0; c < columns; ++c)
                sums[to[e] * columns + c] += from[e * columns + c];
        }
    };
    for (const Sum& each : all) {
        if (each.rows.dtype() == Dtype::float32) {
            add(each, static_cast<float*>(each.sums.data()));
        } else {
            add(each, static_cast<double*>(each.sums.data()));
        }
    }
    return true;
}

SectionSizes sizes_of(nb::handle sizes, size_t sections) {
    const int64_t *const data = integers(sizes), count = int64_t(sections);
    const nb::object world = get(sizes, names().shape)[0];
    const SectionSizes found{data, nb::cast<int64_t>(world), count};
    if (numel(sizes) != found.world * count || !is_true(sizes, names().is_contiguous))
        throw nb::value_error("sparsestep: no such sizes");
    return found;
}

// The memory of contiguous tensors; nothing for None.
std::vector<Section> sections_of(nb::list tensors) {
    std::vector<Section> found;
    for (nb::handle tensor : tensors) {
        if (tensor.is_none()) {
            found.push_back({nullptr, 0});
            continue;
        }
        const int64_t elements = numel(tensor);
        const int64_t item = nb::cast<int64_t>(get(tensor, names().itemsize));
        if (!is_true(tensor, names().is_contiguous)) {
            throw nb::value_error("sparsestep: sections must be contiguous");
        }
        found.push_back({static_cast<char*>(address(tensor, elements)), elements * item});
    }
    return found;
}

// Where the message of each process begins.
const int64_t* begins_of(nb::handle begins, const SectionSizes& sizes) {
    const int64_t* const data = integers(begins);
    if (numel(begins) != sizes.world) throw nb::value_error("sparsestep: no such messages");
    return data;
}

void run_pack(nb::list tensors, nb::object sizes, int64_t own, nb::object begins,
              nb::object buffer) {
    const std::vector<Section> sections = sections_of(tensors);
    const SectionSizes of = sizes_of(sizes, sections.size());
    const int64_t* const at = begins_of(begins, of);
    char* const to = static_cast<char*>(address(buffer));
    const SectionSplit split(sections, of);
    if (!split.is_valid() || !fits_buffer(of, at, own, numel(buffer))) {
        throw nb::value_error("sparsestep: no such messages");
    }
    nb::gil_scoped_release release;
    pack_messages(split, of.world, own, at, to);
}

void run_unpack(nb::object buffer, nb::object sizes, int64_t own, nb::object begins,
                nb::list tensors, nb::list mine, nb::object own_sizes) {
    const std::vector<Section> sections = sections_of(tensors), kept = sections_of(mine);
    const SectionSizes of = sizes_of(sizes, sections.size());
    const SectionSizes sent = sizes_of(own_sizes, kept.size());
    const int64_t* const at = begins_of(begins, of);
    const char* const from = static_cast<const char*>(address(buffer));
    const SectionSplit split(sections, of), kept_split(kept, sent);
    bool fits = own >= -1 && own < of.world && sent.world == of.world &&
                sections.size() == kept.size() && split.is_valid() && kept_split.is_valid() &&
                fits_buffer(of, at, own, numel(buffer));
    const std::vector<int64_t> totals = of.totals();
    for (size_t s = 0; s < sections.size() && fits; ++s) {
        fits = totals[s] == sections[s].bytes &&
               (own < 0 || of.at(own, int64_t(s)) == sent.at(own, int64_t(s)));
    }
    if (!fits) throw nb::value_error("sparsestep: no such messages");
    nb::gil_scoped_release release;
    unpack_messages(from, of.world, own, at, split, kept_split);
}

void run_copy_pieces(nb::object from, nb::object to, nb::object sources, nb::object targets,
                     nb::object sizes) {
    const int64_t count = numel(sizes);
    if (numel(sources) != count || numel(targets) != count ||
        !copy_pieces(static_cast<const char*>(address(from)), numel(from),
                     static_cast<char*>(address(to)), numel(to), integers(sources),
                     integers(targets), integers(sizes), count)) {
        throw nb::value_error("sparsestep: no such pieces");
    }
}

// Rows of float32 and their codes; the number of rows.
int64_t coded_rows(int format, nb::handle values, int64_t dim, nb::handle codes) {
    const int64_t count = dim > 0 ? numel(values) / dim : 0;
    const bool is_known = (format == 0 || format == 1) && dim > 0;
    if (!is_known || numel(values) != count * dim || dtype_code(values) != int(Dtype::float32) ||
        nb::cast<int64_t>(get(codes, names().itemsize)) != 1 ||
        numel(codes) != count * wire_bytes(WireFormat(format), dim) ||
        !is_true(values, names().is_contiguous) || !is_true(codes, names().is_contiguous)) {
        throw nb::value_error("sparsestep: no such rows");
    }
    return count;
}

void run_encode(int format, nb::object values, int64_t dim, nb::object seed, nb::object codes) {
    const int64_t count = coded_rows(format, values, dim, codes);
    const uint64_t number = seed.is_none() ? 0 : nb::cast<uint64_t>(seed);
    const float* const from = static_cast<const float*>(address(values));
    char* const to = static_cast<char*>(address(codes));
    const uint64_t* const given = seed.is_none() ? nullptr : &number;
    nb::gil_scoped_release release;
    encode_rows(WireFormat(format), from, count, dim, given, to);
}

void run_decode(int format, nb::object codes, int64_t dim, nb::object values) {
    const int64_t count = coded_rows(format, values, dim, codes);
    const char* const from = static_cast<const char*>(address(codes));
    float* const to = static_cast<float*>(address(values));
    nb::gil_scoped_release release;
    decode_rows(WireFormat(format), from, count, dim, to);
}

void bind_round_robin(nb::module_& module) {
    module.def("split_by_owner", &run_split, nb::arg("ids"), nb::arg("starts").none(),
               nb::arg("world"), nb::arg("rows"), nb::arg("order").none(), nb::arg("bags").none(),
               nb::arg("lengths").none(), nb::arg("counts"),
               "Sort bags of ids by the owners of their rows; counts: ids and bags of each.");
    module.def("pack_messages", &run_pack, nb::arg("sections"), nb::arg("sizes"), nb::arg("own"),
               nb::arg("begins"), nb::arg("buffer"),
               "Write the sections of each process but its own one after another.");
    module.def("unpack_messages", &run_unpack, nb::arg("buffer"), nb::arg("sizes"), nb::arg("own"),
               nb::arg("begins"), nb::arg("sections"), nb::arg("own_sections"),
               nb::arg("own_sizes"),
               "The reverse; a process's own sections are copied from what it would have sent.");
    module.def("encode_rows", &run_encode, nb::arg("format"), nb::arg("values"), nb::arg("dim"),
               nb::arg("seed").none(), nb::arg("codes"),
               "Write rows in fewer bytes, 0: bf16, 1: int8; with a seed, rounded at random.");
    module.def("decode_rows", &run_decode, nb::arg("format"), nb::arg("codes"), nb::arg("dim"),
               nb::arg("values"), "The reverse.");
    module.def("copy_pieces", &run_copy_pieces, nb::arg("source"), nb::arg("target"),
               nb::arg("sources"), nb::arg("targets"), nb::arg("sizes"),
               "Copy pieces of a buffer of bytes to another.");
    module.def("request_rows", &run_request_rows, nb::arg("tables"), nb::arg("world"),
               nb::arg("counts"),
               "The distinct ids of all tables by owner, and the row of each id; None where "
               "anything is unusual or wrong.");
    module.def("sum_rows", &run_sum_rows, nb::arg("tables"),
               "Add rows to rows of zeros by an index, in order; False, and nothing done, where "
               "anything is unusual.");
    module.def("unique", &run_unique, nb::arg("ids"), nb::arg("rows"), nb::arg("unique"),
               nb::arg("which"), "Write out the unique ids; how many, or -1 where one is no row.");
}

}  // namespace
}  // namespace sparsestep
