// Ids and their rows: see src/sparsestep/nn/vocabulary/id_table.py. Included by bindings.cpp alone.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>

#include "core/vocabulary.h"
#include "python/round_robin.h"

namespace sparsestep {
namespace {

VocabularyArrays arrays_of(nb::handle ids, nb::handle counts, nb::handle seen,
                           nb::handle candidate_ids, nb::handle candidate_counts,
                           const VocabularyOptions& options) {
    return {writable(ids, options.rows), writable(counts, options.rows),
            writable(seen, options.rows), writable(candidate_ids, options.candidates),
            writable(candidate_counts, options.candidates)};
}

// The core's, with the options that tell how much there is to read and write.
class BoundVocabulary {
public:
    explicit BoundVocabulary(const VocabularyOptions& options)
        : options_(options), known_(options) {}

    int64_t find(nb::object ids, nb::object rows, int threads) {
        const int64_t count = numel(ids);
        const int64_t* const from = integers(ids);
        int64_t* const to = writable(rows, count);
        rollback();
        nb::gil_scoped_release release;
        return known_.find(from, count, to, threads);
    }

    // How many ids had no row, how many rows were evicted, and the number of the claim.
    nb::tuple claim(nb::object ids, nb::object rows, int64_t now, nb::object taken, int threads) {
        const int64_t count = numel(ids);
        const int64_t* const from = integers(ids);
        int64_t *const to = writable(rows, count), *const evicted = writable(taken, count);
        const int64_t most = std::numeric_limits<uint32_t>::max();
        if (now < 1 || now > most) throw nb::value_error("sparsestep: no such time");
        Vocabulary::Claim made;
        {
            nb::gil_scoped_release release;
            made = known_.claim(from, count, now, to, evicted, threads);
        }
        pending_ = ++claims_;
        return nb::make_tuple(made.without, made.taken, pending_);
    }

    bool is_pending(int64_t claim) const { return claim && claim == pending_; }

    void commit() {
        pending_ = 0;
        known_.commit();
    }

    void rollback() {
        pending_ = 0;
        known_.rollback();
    }

    nb::tuple sizes() {
        rollback();
        const VocabularySizes found = known_.sizes();
        return nb::make_tuple(found.used, found.candidates, found.sightings);
    }

    void save(nb::object ids, nb::object counts, nb::object seen, nb::object candidate_ids,
              nb::object candidate_counts) {
        rollback();
        known_.save(arrays_of(ids, counts, seen, candidate_ids, candidate_counts, options_));
    }

    bool load(nb::object ids, nb::object counts, nb::object seen, nb::object candidate_ids,
              nb::object candidate_counts, int64_t used, int64_t candidates, int64_t sightings,
              int64_t now) {
        const bool fits = used >= options_.shared && used <= options_.rows && candidates >= 0 &&
                          candidates <= options_.candidates;
        if (!fits) throw nb::value_error("sparsestep: no such vocabulary");
        rollback();
        return known_.load(arrays_of(ids, counts, seen, candidate_ids, candidate_counts, options_),
                           {used, candidates, sightings}, now);
    }

    int64_t bytes() const { return known_.bytes(); }

private:
    VocabularyOptions options_;
    Vocabulary known_;
    int64_t claims_ = 0, pending_ = 0;  // the number of the pending claim, or 0
};

BoundVocabulary make_vocabulary(int64_t rows, int64_t shared, int64_t admit, int64_t candidates,
                                int eviction, int64_t fades_after, nb::tuple keys) {
    const bool fits = rows > 0 && rows <= INT32_MAX && shared > 0 && shared <= rows && admit > 0 &&
                      candidates >= 0 && candidates <= rows && eviction >= 0 && eviction <= 2;
    if (!fits) throw nb::value_error("sparsestep: no such vocabulary");
    return BoundVocabulary({rows,
                            shared,
                            admit,
                            candidates,
                            Eviction(eviction),
                            fades_after,
                            {nb::cast<uint64_t>(keys[0]), nb::cast<uint64_t>(keys[1]) | 1}});
}

void bind_vocabulary(nb::module_& module) {
    nb::class_<BoundVocabulary>(module, "Vocabulary", "Which row each id has.")
        .def("find", &BoundVocabulary::find, nb::arg("ids"), nb::arg("rows"), nb::arg("threads"),
             "Write the row of each id; how many have none of their own.")
        .def("claim", &BoundVocabulary::claim, nb::arg("ids"), nb::arg("rows"), nb::arg("now"),
             nb::arg("taken"), nb::arg("threads"),
             "Count ids and assign rows, provisionally: any call but commit undoes it.")
        .def("is_pending", &BoundVocabulary::is_pending, nb::arg("claim"),
             "Whether there was no other call since a claim.")
        .def("commit", &BoundVocabulary::commit, "Make the pending claim final.")
        .def("rollback", &BoundVocabulary::rollback, "Undo the pending claim, if there is one.")
        .def("sizes", &BoundVocabulary::sizes, "Rows in use, candidates, sightings.")
        .def("save", &BoundVocabulary::save, nb::arg("ids"), nb::arg("counts"), nb::arg("seen"),
             nb::arg("candidate_ids"), nb::arg("candidate_counts"), "Write all of it to tensors.")
        .def("load", &BoundVocabulary::load, nb::arg("ids"), nb::arg("counts"), nb::arg("seen"),
             nb::arg("candidate_ids"), nb::arg("candidate_counts"), nb::arg("used"),
             nb::arg("candidates"), nb::arg("sightings"), nb::arg("now"),
             "Replace all of it; false, and nothing done, where an id comes twice.")
        .def("bytes", &BoundVocabulary::bytes, "How much memory it may use.");
    module.def("vocabulary", &make_vocabulary, nb::arg("rows"), nb::arg("shared"), nb::arg("admit"),
               nb::arg("candidates"), nb::arg("eviction"), nb::arg("fades_after"), nb::arg("keys"),
               "One that has seen nothing.");
}

}  // namespace
}  // namespace sparsestep
