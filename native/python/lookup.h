// Embedding lookups for src/sparsestep/nn. Included by bindings.cpp alone.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <vector>

#include "core/lookup.h"
#include "core/memory.h"
#include "core/ngrams.h"
#include "python/step.h"
#include "python/tensors.h"

namespace sparsestep {
namespace {

// How tensors are made: torch.empty(*shape, dtype=..., device="cpu").
struct MakeTensors {
    PyObject* empty;
    PyObject* keywords;
    PyObject* cpu;

    MakeTensors() {
        // Never released: Python's own teardown may come first.
        const nb::object torch = nb::module_::import_("torch");
        empty = nb::object(torch.attr("empty")).release().ptr();
        cpu = nb::object(torch.attr("device")("cpu")).release().ptr();
        keywords = nb::make_tuple("dtype", "device").release().ptr();
    }
    nb::object operator()(nb::handle shape, PyObject* dtype) const {
        PyObject* arguments[] = {shape.ptr(), dtype, cpu};
        PyObject* made = PyObject_Vectorcall(empty, arguments, 1, keywords);
        if (!made) throw nb::python_error();
        return nb::steal(made);
    }
    static const MakeTensors& get() {
        static const MakeTensors made;
        return made;
    }
};

// False if torch returns another kind of tensor, as under a fake mode.
template <class T>
bool make_tensor(nb::object& tensor, nb::handle shape, PyObject* dtype, T*& to) {
    tensor = MakeTensors::get()(shape, dtype);
    PlainTensor made;
    if (!made.read(tensor)) return false;
    to = static_cast<T*>(made.data());
    return true;
}

bool read_integers(nb::handle tensor, PlainTensor& read, Integers& to) {
    if (!read.read(tensor) || read.dl.code != dl_int || is_true(tensor, names().is_neg)) {
        return false;
    }
    to = {read.data(), read.dl.bits == 32};
    return read.dl.bits == 64 || read.dl.bits == 32;
}

// A lookup in one table, and its result. Off the fast path, Python handles all cases and raises all
// messages.
struct LookupCall {
    LookupWork work{};
    nb::object output = nb::none(), indices = nb::none(), value_index = nb::none();
    nb::object winners = nb::none(), counted = nb::none();

    // `asked` is (weight, ids, starts or None, whether these have the end of the last bag, factors
    // or None (queries, for dot products), pooling, padding, whether there is to be a gradient).
    // False off the fast path.
    bool read(nb::tuple asked) {
        const nb::object weight = asked[0], ids = asked[1];
        PlainTensor table, which;
        if (!table.read_rows(weight) || table.dl.dims != 2 || !table.dtype() ||
            table.numel() == 0 || !read_integers(ids, which, work.ids) ||
            is_true(weight, names().is_neg)) {
            return false;
        }
        work.table = table.data();
        work.dtype = *table.dtype();
        work.rows = table.dl.shape[0];
        work.columns = table.dl.shape[1];
        work.row_stride = table.row_stride();
        work.id_count = which.numel();
        work.pooling = Pooling(nb::cast<int>(asked[5]));
        work.padding = nb::cast<int64_t>(asked[6]);
        if (!read_bags(which, asked[2], nb::cast<bool>(asked[3])) ||
            !read_factors(which, asked[4])) {
            return false;
        }
        const nb::object dtype = get(weight, names().dtype);
        return work.bags > 0 && make(dtype, get(ids, names().shape), nb::cast<bool>(asked[7]));
    }

    // The fields of LookupResult: the output; for a gradient, row and bag of each id without
    // padding; the row of each maximum; the number of ids of each bag.
    nb::tuple result(int64_t entries) {
        if (!indices.is_none() && entries < work.id_count) {
            indices = indices.attr("narrow")(0, 0, entries);
            if (!value_index.is_none()) value_index = value_index.attr("narrow")(0, 0, entries);
        }
        return nb::make_tuple(output, indices, value_index, winners, counted);
    }

private:
    bool read_bags(const PlainTensor& ids, nb::handle starts, bool have_end) {
        work.length = 1;
        work.bags = work.id_count;
        if (work.pooling == Pooling::none) return starts.is_none();
        if (ids.dl.dims == 2 && starts.is_none()) {
            work.bags = ids.dl.shape[0];
            work.length = ids.dl.shape[1];
            return true;
        }
        PlainTensor begins;
        if (ids.dl.dims != 1 || !read_integers(starts, begins, work.starts)) return false;
        work.start_count = begins.numel();
        work.bags = work.start_count - have_end;
        return begins.dl.dims == 1;
    }

    bool read_factors(const PlainTensor& ids, nb::handle factors) {
        if (work.pooling == Pooling::dot) return read_queries(factors);
        if (factors.is_none()) return true;
        PlainTensor read;
        if (work.pooling != Pooling::sum || !read.read(factors) || read.dtype() != work.dtype ||
            !read.has_shape_of(ids, ids.dl.dims) || is_true(factors, names().is_neg)) {
            return false;
        }
        work.factors = read.data();
        return true;
    }

    bool read_queries(nb::handle queries) {
        PlainTensor read;
        if (!read.read(queries) || read.dtype() != work.dtype || read.dl.dims != 2 ||
            read.dl.shape[0] != work.bags || read.dl.shape[1] != work.columns ||
            is_true(queries, names().is_neg)) {
            return false;
        }
        work.queries = read.data();
        return true;
    }

    // Allocates the outputs. False if torch returns other tensors, as under a fake mode.
    bool make(nb::handle dtype, nb::object shape, bool has_gradient) {
        const bool is_max = work.pooling == Pooling::max;
        nb::object of_ids = nb::make_tuple(work.id_count);
        nb::object of_output = nb::make_tuple(work.bags, work.columns);
        if (work.pooling == Pooling::none) {
            of_output =
                nb::steal(PySequence_Concat(shape.ptr(), nb::make_tuple(work.columns).ptr()));
            if (!of_output.is_valid()) throw nb::python_error();
        }
        if (work.pooling == Pooling::dot) of_output = shape;
        if (!make_tensor(output, of_output, dtype.ptr(), work.output)) return false;
        if (!has_gradient) return true;
        if (is_max && !make_tensor(winners, of_output, names().int64, work.winners)) return false;
        const bool sizes_differ = work.padding >= 0 || work.starts.data;
        if (is_max || (work.pooling == Pooling::mean && sizes_differ)) {
            if (!make_tensor(counted, nb::make_tuple(work.bags), names().int64, work.counted))
                return false;
        }
        if (is_max) return true;
        const bool has_source = sizes_differ || work.length != 1;
        return make_tensor(indices, of_ids, names().int64, work.indices) &&
               (!has_source || make_tensor(value_index, of_ids, names().int64, work.value_index));
    }
};

// Looks up all tables. None, and nothing done, off the fast path or on invalid input.
nb::object run_look_up(nb::list tables, int threads, int instruction_set) {
    if (!names().exchange) return nb::none();
    std::vector<LookupCall> asked(nb::len(tables));
    int64_t words = 0;
    for (size_t i = 0; i < asked.size(); ++i) {
        if (!asked[i].read(nb::cast<nb::tuple>(tables[i]))) return nb::none();
        if (!asked[i].work.indices) words += asked[i].work.id_count;
    }
    Scratch scratch;
    if (words) scratch.reserve(size_t(words) * sizeof(int64_t));
    int64_t* at = static_cast<int64_t*>(scratch.data());
    std::vector<LookupWork> works;
    for (LookupCall& each : asked) {
        if (!each.work.indices) {
            each.work.indices = at;
            at += each.work.id_count;
        }
        works.push_back(each.work);
    }
    std::vector<int64_t> counted(works.size());
    const Lookup run = instruction_set_of(instruction_set).lookup;
    bool good;
    {
        nb::gil_scoped_release release;
        good = look_up(works.data(), int64_t(works.size()), run, threads, counted.data());
    }
    if (!good) return nb::none();
    nb::list found;
    for (size_t i = 0; i < asked.size(); ++i) found.append(asked[i].result(counted[i]));
    return found;
}

// The rows of all n-grams, and the starts of bags. None, and nothing done, off the fast path or if
// a token is negative.
nb::object run_hash_ngrams(nb::object tokens, nb::object documents, nb::tuple orders, int64_t heads,
                           int64_t seed, nb::object weight, int64_t rows, bool is_split,
                           int threads) {
    Ngrams ngrams{};
    PlainTensor ids, changes, table;
    if (!names().exchange || !read_integers(tokens, ids, ngrams.tokens) || ids.dl.dims != 2) {
        return nb::none();
    }
    if (!documents.is_none() &&
        (!read_integers(documents, changes, ngrams.documents) || !changes.has_shape_of(ids, 2))) {
        return nb::none();
    }
    ngrams.positions = ids.numel();
    ngrams.time = ids.dl.shape[1];
    for (nb::handle order : orders) ngrams.orders.push_back(nb::cast<int64_t>(order));
    ngrams.heads = heads;
    ngrams.seed = uint64_t(seed);
    ngrams.rows = uint64_t(rows);
    ngrams.is_split = is_split;
    if (table.read_rows(weight) && table.dl.dims == 2 && table.dl.shape[0] == rows) {
        ngrams.table = static_cast<const char*>(table.data());
        ngrams.row_bytes = table.row_stride() * int64_t(table.dl.bits / 8);
    }
    const bool fits = ngrams.positions > 0 && !ngrams.orders.empty() && heads > 0 && rows > 0;
    if (!fits) return nb::none();
    nb::object found = nb::none(), starts = nb::none();
    int64_t *to = nullptr, *bags = nullptr;
    const int64_t most = ngrams.positions * ngrams.per_position();
    if (!make_tensor(found, nb::make_tuple(most), names().int64, to) ||
        !make_tensor(starts, nb::make_tuple(ngrams.bags() + 1), names().int64, bags)) {
        return nb::none();
    }
    int64_t count;
    {
        nb::gil_scoped_release release;
        count = hash_ngrams(ngrams, to, bags, threads);
    }
    if (count < 0) return nb::none();
    return nb::make_tuple(found.attr("narrow")(0, 0, count), starts);
}

void bind_lookup(nb::module_& module) {
    module.def("hash_ngrams", &run_hash_ngrams, nb::arg("tokens"), nb::arg("documents").none(),
               nb::arg("orders"), nb::arg("heads"), nb::arg("seed"), nb::arg("weight"),
               nb::arg("rows"), nb::arg("is_split"), nb::arg("threads"),
               "The rows of all n-grams and the starts of bags, and the rows of the weight "
               "prefetched; None, and nothing done, where anything is unusual or wrong.");
    module.def("look_up", &run_look_up, nb::arg("tables"), nb::arg("threads"),
               nb::arg("instruction_set"),
               "Look up rows or bags in all tables; None, and nothing done, where anything is "
               "unusual or wrong.");
}

}  // namespace
}  // namespace sparsestep
