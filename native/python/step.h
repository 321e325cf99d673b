// The jobs of one step, as Python's side hands them over. Included by bindings.cpp alone.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/dispatch.h"
#include "core/step.h"
#include "python/groups.h"
#include "python/tensors.h"
#include "python/usual.h"

namespace sparsestep {
namespace {

const KernelTable& kernels_of(int instruction_set) {
    const auto& sets = instruction_sets();
    if (instruction_set < 0 || size_t(instruction_set) >= sets.size() ||
        !sets[size_t(instruction_set)].available) {
        throw nb::value_error("this machine does not have that instruction set");
    }
    return sets[size_t(instruction_set)].kernels;
}

// False if the core cannot reach the tensor.
bool read_view(nb::handle tensor, int64_t rows, int64_t block, View& to) {
    const std::optional<View> found = view(tensor, rows, block);
    if (found) to = *found;
    return found.has_value();
}

// False if the core cannot reach them, or a slot is longer than it can encode.
bool read_codes(nb::handle codes, nb::handle scale, const Job& job, Codes& to) {
    const Names& name = names();
    for (nb::handle tensor : {codes, scale}) {
        if (get(tensor, name.is_cpu).ptr() != Py_True) return false;
    }
    const bool fits = numel(codes) == job.slots * job.block && numel(scale) == job.slots;
    if (!fits || get(codes, name.dtype).ptr() != name.int8 || dtype_code(scale) != 2) {
        throw nb::value_error("codes must be int8 with a float32 scale for each row");
    }
    const auto where = place(codes, job.slots, job.block), of_scale = place(scale, job.slots, 1);
    if (!where || !of_scale || where->across != 1) return false;
    to.data = static_cast<int8_t*>(where->data);
    to.stride = where->down;
    to.scale = static_cast<float*>(of_scale->data);
    to.scale_stride = of_scale->down;
    return job.block <= max_coded_block;
}

// What an IndexedGrad (see touched.py) says, but for what is held in part.
bool read_gradient(nb::tuple touched, Job& job) {
    job.positions = integers(touched[0]);
    job.slots = nb::cast<int64_t>(touched[2]);
    job.block = nb::cast<int64_t>(touched[3]);
    job.source = integers(touched[4]);
    job.whole = touched[0].is_none();
    job.entries = job.whole ? job.slots : numel(touched[0]);
    const bool by_number = !touched[4].is_none();
    if (by_number && numel(touched[4]) != job.entries) throw nb::value_error("no such source");
    job.rows = by_number && job.block > 0 ? numel(touched[1]) / job.block : job.entries;
    return read_view(touched[1], job.rows, job.block, job.values) &&
           (touched[5].is_none() || read_view(touched[5], job.entries, 1, job.scale));
}

// See rounding.Dealt.
void read_dealt(const nb::tuple& from, DealtRows& to) {
    to = {nb::cast<int64_t>(from[0]), nb::cast<int64_t>(from[1]), nb::cast<int64_t>(from[2])};
    if (to.length < 1 || to.step < 1) throw nb::value_error("no such rows");
}

// The jobs of one step. Keeps the tensors alive that its jobs point to.
class Jobs {
public:
    explicit Jobs(int instruction_set) : kernels_(kernels_of(instruction_set)) {}

    // False, and nothing added, where the core has no way to run it. `touched` is what touched.py
    // says it is. Whoever answers for the group, and the parameter's number there, are returned
    // with a bad entry.
    bool add(const Group& group, int64_t step, nb::tuple touched, nb::object param, nb::list states,
             std::optional<uint64_t> seed, std::optional<nb::tuple> dealt, nb::object owner,
             int64_t index) {
        const RuleKernels rule = group.kernels(kernels_);
        if (nb::len(states) != nb::len(group.names) || nb::len(touched) != 7) {
            throw nb::value_error("a rule was given the wrong number of states");
        }
        Job job{};
        group.write_to(job, step);
        if (!read_gradient(touched, job)) return false;
        if (!touched[6].is_none()) {
            if (numel(touched[6]) != job.rows * job.block) throw nb::value_error("no such mask");
            job.held = static_cast<const bool*>(address(touched[6]));
        }
        job.stochastic = seed.has_value() && group.stochastic;
        job.seed = seed.value_or(0);
        if (dealt) read_dealt(*dealt, job.dealt);
        if (!read_view(param, job.slots, job.block, job.param)) return false;
        job.coded = !group.signs.empty();
        for (int s = 0; s < rule.states; ++s) {
            if (job.coded) {
                nb::handle scale = states[size_t(rule.states + rule.slot_states + s)];
                if (!read_codes(states[size_t(s)], scale, job, job.codes[s])) return false;
                job.codes[s].is_signed = group.signs[size_t(s)];
            } else if (!read_view(states[size_t(s)], job.slots, job.block, job.state[s])) {
                return false;
            }
        }
        for (int s = 0; s < rule.slot_states; ++s) {
            nb::handle state = states[size_t(rule.states + s)];
            if (!read_view(state, job.slots, 1, job.slot_state[s])) return false;
        }
        finish(job, rule, {std::move(owner), index});
        keep_alive(group);
        alive_.push_back(std::move(touched));
        written_.append(param);
        alive_.push_back(std::move(param));
        alive_.push_back(std::move(states));
        return true;
    }

    // Claims every parameter of a group that is in the usual form: a row-sparse gradient on the
    // CPU, or a dense one of which `selections` has the rows or elements; state that fits;
    // everything contiguous. Whatever is unusual in any way is left, untouched, to Python's side:
    // it has all cases and all messages. Gradients are those of the parameters unless there are
    // others; the first parameter has the number `first` in its group. `known` tells where the
    // memory of a parameter and its state was when Python's side looked at it. Returns the numbers
    // of the parameters that are declined; those without a gradient are not among them.
    nb::list try_claim(const Group& group, nb::object owner, nb::sequence given, nb::dict state,
                       nb::dict known, nb::set seen, nb::handle selections, nb::handle grads,
                       int64_t first) {
        nb::list declined;
        const nb::tuple params(given);  // whatever happens to the list meanwhile
        const size_t count = nb::len(params);
        if ((!selections.is_none() && nb::len(selections) != count) ||
            (!grads.is_none() && nb::len(grads) != count)) {
            throw nb::value_error("there must be as many selections and gradients as parameters");
        }
        for (size_t i = 0; i < count; ++i) {
            const nb::object param = params[i];
            const nb::object grad =
                grads.is_none() ? get(param, names().grad) : nb::object(grads[i]);
            if (grad.is_none()) continue;
            nb::object selection = nb::none();
            if (!selections.is_none()) selection = selections[i];
            const int64_t index = first + int64_t(i);
            if (!claim(group, {owner, index}, param, grad, state, known, seen, selection)) {
                declined.append(index);
            }
        }
        return declined;
    }

    // Claims all gradients of a group, or tells that it cannot. There are as many selections as
    // parameters, or none at all.
    bool claim_all(const Group& group, nb::handle given, nb::dict state, nb::dict known,
                   nb::set seen, const std::vector<nb::object>& selections) {
        const nb::tuple params = nb::tuple(given);
        for (size_t i = 0; i < nb::len(params); ++i) {
            const nb::object param = params[i], grad = get(param, names().grad);
            const nb::object selection = selections.empty() ? nb::none() : selections[i];
            if (!grad.is_none() && !claim(group, {}, param, grad, state, known, seen, selection)) {
                return false;
            }
        }
        return true;
    }

    // Does all that may fail; returns the first bad entry, if there is one.
    std::optional<BadEntry> try_prepare(int threads) {
        nb::gil_scoped_release release;
        step_ = std::make_unique<Step>(jobs_.data(), int64_t(jobs_.size()), threads);
        const std::optional<BadEntry> bad = step_->prepare();
        if (bad) step_.reset();
        return bad;
    }

    nb::object prepare(int threads) {
        const std::optional<BadEntry> bad = try_prepare(threads);
        if (!bad) return nb::none();
        const Owner& owner = owners_[size_t(bad->job)];
        return nb::make_tuple(owner.who, owner.index, jobs_[size_t(bad->job)].slots, bad->position);
    }

    void commit() {
        if (!step_) throw nb::value_error("nothing was prepared");
        {
            nb::gil_scoped_release release;
            step_->apply();
        }
        step_.reset();  // once is enough
        for (const Count& taken : counts_) taken.advance();
        if (nb::len(written_) == 0) return;
        PyObject* arguments[] = {written_.ptr()};
        PyObject* done = PyObject_Vectorcall(names().increment_version, arguments, 1, nullptr);
        if (!done) throw nb::python_error();
        Py_DECREF(done);
    }

private:
    struct Owner {
        nb::object who;
        int64_t index = 0;
    };

    bool claim(const Group& group, Owner owner, nb::handle param, nb::handle grad, nb::dict state,
               nb::dict known, nb::set seen, nb::handle selection) {
        const nb::object id = nb::steal(PyLong_FromVoidPtr(param.ptr()));
        PyObject* const memory = find(known, id);
        Plain own;
        // Seen already: a parameter that is given twice.
        if (!names().exchange || !memory || contains(seen, id) || !own.read_rows(param) ||
            own.dl.dims == 0 || own.numel() == 0 || nb::len(memory) < 2 ||
            nb::handle(memory)[0].ptr() != param.ptr() ||
            !is_address(nb::handle(memory)[1], own.data()) || is_true(param, names().is_neg)) {
            return false;
        }
        Job job{};
        if (!read_usual(own, grad, selection, job, alive_, joined_)) return false;
        const auto view = own.view(job.block);
        if (!view) return false;
        job.param = *view;
        Count count;
        if (!read_state(group, param, own, state, memory, job, count)) return false;
        if (count.value < 0 || (group.step && group.step != count.value + 1)) return false;
        group.write_to(job, count.value + 1);
        finish(job, group.kernels(kernels_), std::move(owner));
        keep_alive(group);
        if (group.counts) counts_.push_back(std::move(count));
        written_.append(param);
        if (PySet_Add(seen.ptr(), id.ptr())) throw nb::python_error();
        return true;
    }

    bool read_state(const Group& group, nb::handle param, const Plain& own, nb::dict state,
                    nb::handle memory, Job& job, Count& count) {
        const RuleKernels rule = group.kernels(kernels_);
        const int states = rule.states + rule.slot_states;
        count.value = 1;  // where nothing is counted, not the first, for there is a state
        if (states == 0 && !group.counts) return true;
        PyObject* record = find(state, param);
        if (!record || !PyDict_Check(record) || nb::len(memory) != size_t(2 + states)) return false;
        if (group.counts && !count.read(record)) return false;
        if (rule.slot_states > 0 && job.slots != own.dl.shape[0]) return false;
        for (int s = 0; s < states; ++s) {
            const bool per_row = s >= rule.states;
            PyObject* tensor = find(record, group.names[size_t(s)]);
            Plain read;
            if (!tensor || !read.read_rows(tensor)) return false;
            if (!is_address(memory[size_t(2 + s)], read.data())) return false;
            const auto view = read.view(per_row ? 1 : job.block);
            if (!view || !read.has_shape_of(own, per_row ? 1 : own.dl.dims)) return false;
            (per_row ? job.slot_state[s - rule.states] : job.state[s]) = *view;
            alive_.push_back(nb::borrow(tensor));
        }
        return true;
    }

    void finish(Job& job, const RuleKernels& rule, Owner owner) {
        bool in_double = job.values.dtype == Dtype::float64 || job.param.dtype == Dtype::float64;
        for (int s = 0; s < rule.states; ++s) {
            in_double |= !job.coded && job.state[s].dtype == Dtype::float64;
        }
        for (int s = 0; s < rule.slot_states; ++s) {
            in_double |= job.slot_state[s].dtype == Dtype::float64;
        }
        job.apply = in_double ? rule.apply_double : rule.apply_float;
        job.by_slot =
            rule.slot_states > 0 || job.coded || (job.program && job.program->phase_count > 1);
        jobs_.push_back(job);
        owners_.push_back(std::move(owner));
    }

    void keep_alive(const Group& group) {
        if (group.program) alive_.push_back(nb::borrow(nb::find(group)));
    }

    KernelTable kernels_;
    std::vector<Job> jobs_;
    std::vector<Owner> owners_;
    std::vector<Count> counts_;
    std::unique_ptr<Step> step_;  // once it is prepared
    nb::list written_;            // parameters
    std::vector<nb::object> alive_;
    std::vector<std::unique_ptr<Joined>> joined_;
};

}  // namespace
}  // namespace sparsestep
