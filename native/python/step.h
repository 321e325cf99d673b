// One step as Python hands it over: programs, param groups, jobs; and a step like the one before,
// in one call. Included by bindings.cpp alone.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/instruction_sets.h"
#include "core/program.h"
#include "core/step.h"
#include "core/threads.h"
#include "core/types.h"
#include "python/grads.h"
#include "python/tensors.h"

namespace sparsestep {
namespace {

// A Program that owns its memory; every register is checked. `phases` has two bytes objects for
// each phase, the instructions of the row and those of its tiles, with six 16-bit numbers for each
// instruction.
class OwnedProgram {
public:
    OwnedProgram(int states, int slot_states, int numbers, nb::tuple phases, nb::bytes row_results)
        : row_results_(numbers_in<uint16_t>(row_results)) {
        program_ = {states, slot_states, numbers, nullptr, int(nb::len(phases)), nullptr};
        if (states < 0 || states > max_states || slot_states < 0 || slot_states > max_slot_states ||
            numbers < 0 || numbers > max_tile_registers || nb::len(phases) == 0 ||
            row_results_.size() != size_t(slot_states)) {
            refuse();
        }
        for (uint16_t r : row_results_) check(r < max_row_registers);
        instructions_.reserve(2 * nb::len(phases));
        for (nb::handle phase : phases) {
            const bool last = phases_.size() + 1 == nb::len(phases);
            instructions_.push_back(numbers_in<Instruction>(nb::cast<nb::bytes>(phase[0])));
            const auto& row = instructions_.back();
            instructions_.push_back(numbers_in<Instruction>(nb::cast<nb::bytes>(phase[1])));
            const auto& tile = instructions_.back();
            check_row(row);
            phases_.push_back({row.data(), row.data() + row.size(), tile.data(),
                               tile.data() + tile.size(), check_tile(tile, last)});
        }
        program_.phases = phases_.data();
        program_.row_results = row_results_.data();
    }
    OwnedProgram(const OwnedProgram&) = delete;

    const Program& get() const { return program_; }

private:
    [[noreturn]] static void refuse() { throw nb::value_error("no such program"); }
    static void check(bool holds) {
        if (!holds) refuse();
    }

    template <class T>
    static std::vector<T> numbers_in(const nb::bytes& bytes) {
        static_assert(std::is_trivially_copyable_v<T>, "its bytes are all there is to it");
        check(bytes.size() % sizeof(T) == 0);
        std::vector<T> found(bytes.size() / sizeof(T));
        if (!found.empty()) std::memcpy(found.data(), bytes.c_str(), bytes.size());
        return found;
    }

    // Operations on the row's numbers, then tiles that are filled with such numbers.
    void check_row(const std::vector<Instruction>& row) const {
        bool spreading = false;
        for (const Instruction& each : row) {
            check(int(each.code) < code_count && each.code < Code::mean);
            check(each.a < max_row_registers && each.b < max_row_registers &&
                  each.c < max_row_registers && each.d < max_row_registers);
            const bool spread = each.code == Code::spread;
            check(spread || !spreading);
            spreading = spread;
            const int first = program_.numbers + (spread ? 2 + program_.states : 0);
            const int end = spread ? max_tile_registers : max_row_registers;
            check(each.to >= first + (spread ? 0 : program_.slot_states) && each.to < end);
        }
    }

    // Operations on tiles; but in the last phase, then those that make numbers of the row.
    uint64_t check_tile(const std::vector<Instruction>& tile, bool last) const {
        int reductions = 0;
        uint64_t reads = 0;
        for (const Instruction& each : tile) {
            check(int(each.code) < code_count && each.code != Code::spread);
            check(each.a < max_tile_registers && each.b < max_tile_registers &&
                  each.c < max_tile_registers && each.d < max_tile_registers);
            for (int r : {each.a, each.b, each.c, each.d}) reads |= uint64_t(1) << r;
            const bool reduces = each.code >= Code::mean;
            check(reduces || !reductions);
            if (reduces) {
                check(!last && ++reductions <= max_reductions && each.to < max_row_registers &&
                      each.to >= program_.slot_states + program_.numbers);
            } else if (each.to < 2 + program_.states) {
                check(last && each.to != 1);
            } else {
                check(each.to >= 2 + program_.states + program_.numbers &&
                      each.to < max_tile_registers);
            }
        }
        return reads;
    }

    Program program_;
    std::vector<Phase> phases_;
    std::vector<std::vector<Instruction>> instructions_;
    std::vector<uint16_t> row_results_;
};

// What a dict has for a key, or null. Looking it up may run Python code, and so raise.
PyObject* find(nb::handle dict, nb::handle key) {
    PyObject* const found = PyDict_GetItemWithError(dict.ptr(), key.ptr());
    if (!found && PyErr_Occurred()) throw nb::python_error();
    return found;
}

bool contains(nb::handle set, nb::handle key) {
    const int found = PySet_Contains(set.ptr(), key.ptr());
    if (found < 0) throw nb::python_error();
    return found == 1;
}

// An int object's value as an address.
bool is_address(nb::handle number, const void* data) {
    const void* const found = PyLong_AsVoidPtr(number.ptr());
    if (!found && PyErr_Occurred()) PyErr_Clear();
    return found == data;
}

// Whether kernels work on the rows of a tensor themselves, instead of converted copies.
bool is_direct(const TensorView& view, bool in_double) {
    return view.element_stride == 1 && view.dtype == (in_double ? Dtype::float64 : Dtype::float32);
}

// See rules/options.py.
RowConstraint read_constraint(const std::optional<nb::tuple>& from) {
    if (!from) return {};
    return {nb::cast<double>((*from)[0]), nb::cast<double>((*from)[1])};
}

// What a param group says about its updates: made once, when Python's side has read the group.
struct NativeGroup {
    int rule = -1;             // one of the core's own, or else:
    nb::object program_owner;  // keeps the program
    const Program* program = nullptr;
    int64_t step = 0;  // the one step that the program is for; 0: any
    nb::tuple names;   // of the rule's state: first per element, then per row
    bool counts;       // whether a parameter's state has a step count
    bool maximize;     // to maximize
    double l2, decay_factor;
    std::vector<double> options;  // of the rule, or the numbers of the program
    bool stochastic_rounding;     // whether half precision is rounded at random
    bool takes_dense;             // whether dense gradients without a mask are the core's
    RowConstraint constraint;
    std::vector<bool> signs;  // for each state that is codes, whether it has a sign; else none

    NativeGroup(int rule, nb::tuple names, bool counts, double sign, double l2, double decay_factor,
                nb::tuple options, bool stochastic_rounding, nb::tuple signs, bool takes_dense,
                std::optional<nb::tuple> constraint)
        : rule(rule),
          names(names),
          counts(counts),
          maximize(sign < 0),
          l2(l2),
          decay_factor(decay_factor),
          stochastic_rounding(stochastic_rounding),
          takes_dense(takes_dense),
          constraint(read_constraint(constraint)) {
        const Kernels kernels = instruction_sets()[0].in_float;
        if (rule < 0 || rule >= kernels.rule_count) throw nb::value_error("no such rule");
        const RuleKernel& of = kernels.rules[rule];
        for (nb::handle each : signs) this->signs.push_back(nb::cast<bool>(each));
        const size_t coded = this->signs.size();  // each has a scale beside it
        if (nb::len(names) != size_t(of.states + of.slot_states) + coded ||
            nb::len(options) != size_t(of.options) || (coded && coded != size_t(of.states))) {
            throw nb::value_error("a rule was given the wrong number of states or options");
        }
        for (nb::handle option : options) this->options.push_back(nb::cast<double>(option));
    }

    NativeGroup(nb::object owner, nb::tuple names, int64_t step, double sign, double l2,
                double decay_factor, nb::tuple numbers, bool stochastic_rounding,
                std::optional<nb::tuple> constraint)
        : program_owner(owner),
          program(&nb::cast<const OwnedProgram&>(owner).get()),
          step(step),
          names(names),
          counts(true),
          maximize(sign < 0),
          l2(l2),
          decay_factor(decay_factor),
          stochastic_rounding(stochastic_rounding),
          takes_dense(true),  // torch has no kernel for a custom rule
          constraint(read_constraint(constraint)) {
        if (nb::len(names) != size_t(program->states + program->slot_states) ||
            nb::len(numbers) != size_t(program->numbers)) {
            throw nb::value_error("a program was given the wrong number of states or numbers");
        }
        for (nb::handle number : numbers) options.push_back(nb::cast<double>(number));
    }

    RuleKernel kernel(const InstructionSet& set, bool in_double) const {
        if (!program) return (in_double ? set.in_double : set.in_float).rules[rule];
        return {"program", program->states, program->slot_states, int(options.size()),
                in_double ? set.program_double : set.program_float};
    }

    // Whether slots have to be rows: the rule keeps state for them, or they are constrained.
    bool needs_row_slots() const {
        return constraint.norm > 0 || kernel(instruction_sets()[0], false).slot_states > 0;
    }

    // A formula that reads whole rows, but has no state for them, is left to Python.
    DenseSlots dense_slots() const {
        if (!takes_dense) return DenseSlots::none;
        if (needs_row_slots()) return DenseSlots::rows;
        return program && program->phase_count > 1 ? DenseSlots::none : DenseSlots::one;
    }

    // The group must outlive the job where it has a program.
    void write_to(Job& job, int64_t step) const {
        job.maximize = maximize;
        job.coupled_decay = l2;
        job.decay_factor = decay_factor;
        job.constraint = constraint;
        job.step = double(step);
        job.program = program;
        job.numbers = options.data();
        if (program) return;
        for (size_t i = 0; i < options.size(); ++i) job.options[i] = options[i];
    }
};

// Whether a dict has these very objects as its values, in this order.
bool has_same_values(nb::handle dict, nb::handle values) {
    if (!PyDict_Check(dict.ptr()) || nb::len(dict) != nb::len(values)) return false;
    PyObject *key, *value;
    Py_ssize_t next = 0;
    for (Py_ssize_t i = 0; PyDict_Next(dict.ptr(), &next, &key, &value); ++i) {
        if (PyTuple_GET_ITEM(values.ptr(), i) != value) return false;
    }
    return true;
}

// A step count: a Python number, or the one element of a tensor. Owns what it points to.
struct StepCount {
    nb::object state;   // the dict that holds it
    nb::object tensor;  // the count itself, if it is a tensor
    nb::object next;    // the number that replaces it, otherwise
    int64_t value = 0;
    void* data = nullptr;
    Dtype dtype = Dtype::float32;

    // Reads the count of a parameter's state. False if it is anything else.
    bool read(nb::handle from) {
        state = nb::borrow(from);
        PyObject* found = find(from, names().step);
        if (!found || !read_count(found)) return false;
        if (!data) next = nb::int_(value + 1);
        return true;
    }
    bool read_count(nb::handle count) {
        if (PyLong_CheckExact(count.ptr())) {
            int overflow = 0;
            value = PyLong_AsLongLongAndOverflow(count.ptr(), &overflow);
            return !overflow;
        }
        tensor = nb::borrow(count);
        PlainTensor read;
        if (!read.read(count) || read.dl.dims != 0 || !read.dtype()) return false;
        data = read.data();
        dtype = *read.dtype();
        if (dtype == Dtype::float32) value = int64_t(*static_cast<float*>(data));
        if (dtype == Dtype::float64) value = int64_t(*static_cast<double*>(data));
        return dtype == Dtype::float32 || dtype == Dtype::float64;
    }
    // Whether a count in a tensor has no fraction.
    bool is_whole() const {
        if (!data) return true;
        return dtype == Dtype::float32 ? *static_cast<float*>(data) == float(value)
                                       : *static_cast<double*>(data) == double(value);
    }
    void advance() const {
        if (!data) {
            // Replaces a value that is there: nothing is allocated.
            if (PyDict_SetItem(state.ptr(), names().step, next.ptr())) PyErr_Clear();
        } else if (dtype == Dtype::float32) {
            *static_cast<float*>(data) = float(value + 1);
        } else {
            *static_cast<double*>(data) = double(value + 1);
        }
    }
};

const InstructionSet& instruction_set_of(int number) {
    const auto& sets = instruction_sets();
    if (number < 0 || size_t(number) >= sets.size() || !sets[size_t(number)].available) {
        throw nb::value_error("this machine does not have that instruction set");
    }
    return sets[size_t(number)];
}

// False if the core cannot reach the tensor.
bool read_view(nb::handle tensor, int64_t rows, int64_t slot_size, TensorView& to) {
    const std::optional<TensorView> found = view(tensor, rows, slot_size);
    if (found) to = *found;
    return found.has_value();
}

// False if the core cannot reach them, or a slot is longer than it can encode.
bool read_codes(nb::handle codes, nb::handle scale, const Job& job, int64_t slots,
                int64_t slot_size, Int8View& to) {
    const PythonNames& name = names();
    for (nb::handle tensor : {codes, scale}) {
        if (get(tensor, name.is_cpu).ptr() != Py_True) return false;
    }
    const bool fits = numel(codes) == slots * slot_size && numel(scale) == job.num_slots;
    if (!fits || get(codes, name.dtype).ptr() != name.int8 || dtype_code(scale) != 2) {
        throw nb::value_error("codes must be int8 with a float32 scale for each row");
    }
    const auto where = row_layout(codes, slots, slot_size),
               of_scale = row_layout(scale, job.num_slots, 1);
    if (!where || !of_scale || where->across != 1) return false;
    to.data = static_cast<int8_t*>(where->data);
    to.stride = where->down;
    to.scale = static_cast<float*>(of_scale->data);
    to.scale_stride = of_scale->down;
    return job.slot_size <= max_kept_slot_size;
}

// Reads an IndexedGrad (see grads/indexed.py) but for its element mask.
bool read_gradient(nb::tuple grad, Job& job) {
    job.indices = integers(grad[0]);
    job.num_slots = nb::cast<int64_t>(grad[2]);
    job.slot_size = nb::cast<int64_t>(grad[3]);
    job.value_index = integers(grad[4]);
    job.all_slots = grad[0].is_none();
    job.entries = job.all_slots ? job.num_slots : numel(grad[0]);
    const bool by_number = !grad[4].is_none();
    if (by_number && numel(grad[4]) != job.entries) throw nb::value_error("no such source");
    job.rows = by_number && job.slot_size > 0 ? numel(grad[1]) / job.slot_size : job.entries;
    return read_view(grad[1], job.rows, job.slot_size, job.values) &&
           (grad[5].is_none() || read_view(grad[5], job.entries, 1, job.scale));
}

// See rounding.RowStride.
void read_row_stride(const nb::tuple& from, RowStride& to) {
    to = {nb::cast<int64_t>(from[0]), nb::cast<int64_t>(from[1]), nb::cast<int64_t>(from[2])};
    if (to.length < 1 || to.step < 1) throw nb::value_error("no such rows");
}

// The step after which each row of a parameter is current, under semantics="dense"; see
// deferred/rows.py.
struct LastSteps {
    int32_t* data;    // for each row; ~step if it never had a gradient
    int32_t initial;  // each entry is xored with it: zero is the initial value
    int32_t now;      // the latest step

    bool are_current(const int64_t* rows, int64_t count, int threads) const {
        constexpr int64_t piece = 8192;
        std::atomic<bool> found{false};  // a deferred row
        parallel(threads, (count + piece - 1) / piece, [&](int64_t p) {
            const int64_t end = std::min(count, (p + 1) * piece);
            for (int64_t i = p * piece; i < end && !found.load(std::memory_order_relaxed); ++i) {
                const int32_t last = data[rows[i]] ^ initial;
                if ((last < 0 ? ~last : last) < now) found = true;
            }
        });
        return !found;
    }
    void set_next(const int64_t* rows, int64_t count) const {
        for (int64_t i = 0; i < count; ++i) data[rows[i]] = (now + 1) ^ initial;
    }
};

// The jobs of one step. Keeps the tensors alive that its jobs point to.
class NativeStep {
public:
    explicit NativeStep(int instruction_set) : set_(instruction_set_of(instruction_set)) {}

    // False, and nothing added, if the core cannot run it. `grad` is an IndexedGrad of
    // grads/indexed.py, `packed` a mask as read_packed reads it, or None. `owner` and
    // `index`, the parameter's number in its group, are returned with a bad entry.
    bool add(const NativeGroup& group, int64_t step, nb::tuple grad, nb::object param,
             nb::list states, std::optional<uint64_t> seed, std::optional<nb::tuple> row_stride,
             nb::object packed, nb::object owner, int64_t index) {
        const RuleKernel rule = group.kernel(set_, false);
        if (nb::len(states) != nb::len(group.names) || nb::len(grad) != 7) {
            throw nb::value_error("a rule was given the wrong number of states");
        }
        Job job{};
        group.write_to(job, step);
        if (!read_gradient(grad, job)) return false;
        if (!grad[6].is_none()) {
            if (numel(grad[6]) != job.rows * job.slot_size) throw nb::value_error("no such mask");
            job.element_mask = static_cast<const bool*>(address(grad[6]));
        }
        job.stochastic_rounding = seed.has_value() && group.stochastic_rounding;
        job.seed = seed.value_or(0);
        if (row_stride) read_row_stride(*row_stride, job.row_stride);
        if (!read_view(param, job.num_slots, job.slot_size, job.param)) return false;
        int64_t state_slots = job.num_slots, state_size = job.slot_size;
        if (!packed.is_none()) {
            const bool in_rows = group.needs_row_slots() || !group.signs.empty();
            const bool has_parts = in_rows || job.all_slots;
            read_packed(packed, job.num_slots * (has_parts ? job.slot_size : 1), job.packed);
            if (job.all_slots) {
                if (in_rows) throw nb::value_error("no such mask");
                if (job.num_slots != 1 || !can_run_packed(group, job)) return false;
                job.slot_size = state_size = job.packed.kept;
            } else {
                // Random bits are those of elements, not of ranks.
                job.expands_state = in_rows || (job.stochastic_rounding && job.slot_size == 1);
                state_slots = job.packed.kept;
                if (job.expands_state) state_size = 1;
            }
        }
        job.has_int8_state = !group.signs.empty();
        for (int s = 0; s < rule.states; ++s) {
            if (job.has_int8_state) {
                nb::handle scale = states[size_t(rule.states + rule.slot_states + s)];
                if (!read_codes(states[size_t(s)], scale, job, state_slots, state_size,
                                job.int8_state[s]))
                    return false;
                job.int8_state[s].is_signed = group.signs[size_t(s)];
            } else if (!read_view(states[size_t(s)], state_slots, state_size, job.state[s])) {
                return false;
            }
        }
        for (int s = 0; s < rule.slot_states; ++s) {
            nb::handle state = states[size_t(rule.states + s)];
            if (!read_view(state, job.num_slots, 1, job.slot_state[s])) return false;
        }
        if (!finish(job, group, {std::move(owner), index})) return false;
        keep_alive(group);
        alive_.push_back(std::move(grad));
        written_.append(param);
        alive_.push_back(std::move(param));
        alive_.push_back(std::move(states));
        alive_.push_back(std::move(packed));
        return true;
    }

    // Claims the parameters of a group that match the fast path: a row-sparse or dense gradient on
    // the CPU, of which `selections` has the rows or elements; state that fits; everything
    // contiguous. Returns the numbers of all others that have a gradient; Python handles them and
    // raises every message. Gradients are those of the parameters unless `grads` are given; `first`
    // is the first parameter's number in its group. `known` has the addresses of a parameter and
    // its state that passed Python's checks. `claimed`, a list or None, gets the number of each
    // claimed parameter and its indices (see read_standard_grad).
    nb::list try_claim(const NativeGroup& group, nb::object owner, nb::sequence given,
                       nb::dict state, nb::dict known, nb::set seen, nb::handle selections,
                       nb::handle grads, int64_t first, nb::handle claimed) {
        nb::list declined;
        const nb::tuple params(given);  // a copy: the list may change meanwhile
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
            nb::object indices;
            if (!claim(group, {owner, index}, param, grad, state, known, seen, selection,
                       indices)) {
                declined.append(index);
            } else if (!claimed.is_none()) {
                nb::borrow<nb::list>(claimed).append(nb::make_tuple(index, indices));
            }
        }
        return declined;
    }

    // Claims all gradients of a group, or tells that it cannot. There are as many selections as
    // parameters, or none at all. `grads`, if not None, are those of the parameters from `first`
    // on.
    bool claim_all(const NativeGroup& group, nb::handle given, nb::dict state, nb::dict known,
                   nb::set seen, const std::vector<nb::object>& selections, nb::handle grads,
                   size_t first) {
        const nb::tuple params = nb::tuple(given);
        const size_t end = grads.is_none() ? nb::len(params) : first + nb::len(grads);
        if (end > nb::len(params)) return false;
        for (size_t i = first; i < end; ++i) {
            const nb::object param = params[i];
            const nb::object grad =
                grads.is_none() ? get(param, names().grad) : nb::object(grads[i - first]);
            const nb::object selection = selections.empty() ? nb::none() : selections[i];
            nb::object indices;
            if (!grad.is_none() &&
                !claim(group, {}, param, grad, state, known, seen, selection, indices)) {
                return false;
            }
        }
        return true;
    }

    // Claims a parameter whose state tensors and step number are given, and makes the checks that
    // the addresses of `claim` stand for.
    bool claim_one(const NativeGroup& group, nb::handle param, nb::handle grad, nb::list states,
                   int64_t step) {
        const RuleKernel rule = group.kernel(set_, false);
        PlainTensor own;
        if (!names().exchange || !own.read_rows(param) || own.numel() == 0 ||
            nb::len(states) != nb::len(group.names) || !group.signs.empty() ||
            !is_writable(param, own)) {
            return false;
        }
        Job job{};
        nb::object indices;
        if (!read_standard_grad(own, grad, nb::none(), group.dense_slots(), job, indices, alive_,
                                joined_) ||
            !has_row_slots(group, own, job)) {
            return false;
        }
        const auto view = own.view(job.slot_size);
        if (!view) return false;
        job.param = *view;
        written_.append(param);
        for (size_t s = 0; s < nb::len(states); ++s) {
            PlainTensor read;
            const nb::object tensor = states[s];
            if (!read_state_tensor(tensor, own, rule, int(s), job, read) ||
                !is_writable(tensor, read)) {
                return false;
            }
            written_.append(tensor);
        }
        group.write_to(job, step);
        return finish(job, group, {});
    }

    // Does all that may fail; returns the first bad entry, if there is one.
    std::optional<OutOfRange> try_prepare(int threads) {
        nb::gil_scoped_release release;
        step_ = std::make_unique<Step>(jobs_.data(), int64_t(jobs_.size()), threads);
        const std::optional<OutOfRange> bad = step_->prepare();
        if (bad) step_.reset();
        return bad;
    }

    // Has the commit advance the last steps of all rows that get a gradient. `deferred` has for
    // each job its parameter and its LastSteps; None for the last steps of a parameter whose
    // gradients are dense. False if another parameter was claimed, or one with the other kind of
    // gradient, or if a row is deferred.
    bool set_last_steps(nb::list deferred, int threads) {
        if (nb::len(deferred) != jobs_.size()) return false;
        for (size_t i = 0; i < jobs_.size(); ++i) {
            const nb::tuple one = nb::cast<nb::tuple>(deferred[i]);
            const bool is_dense = one[1].is_none();
            if (one[0].ptr() != written_[i].ptr() || is_dense != jobs_[i].all_slots) return false;
            if (is_dense) {
                last_steps_.push_back({nullptr, 0, 0});
                continue;
            }
            if (numel(one[1]) != jobs_[i].num_slots) return false;
            alive_.push_back(one);
            last_steps_.push_back({static_cast<int32_t*>(own_address(one[1])),
                                   nb::cast<int32_t>(one[2]), nb::cast<int32_t>(one[3])});
        }
        nb::gil_scoped_release release;
        for (size_t i = 0; i < jobs_.size(); ++i) {
            if (last_steps_[i].data &&
                !last_steps_[i].are_current(jobs_[i].indices, jobs_[i].entries, threads)) {
                return false;
            }
        }
        return true;
    }

    nb::object prepare(int threads) {
        const std::optional<OutOfRange> bad = try_prepare(threads);
        if (!bad) return nb::none();
        const Owner& owner = owners_[size_t(bad->job)];
        return nb::make_tuple(owner.who, owner.index, jobs_[size_t(bad->job)].num_slots,
                              bad->index);
    }

    void commit() {
        if (!step_) throw nb::value_error("nothing was prepared");
        {
            nb::gil_scoped_release release;
            step_->apply();
            for (size_t i = 0; i < last_steps_.size(); ++i) {
                if (!last_steps_[i].data) continue;
                last_steps_[i].set_next(jobs_[i].indices, jobs_[i].entries);
            }
        }
        step_.reset();  // once is enough
        for (const StepCount& taken : counts_) taken.advance();
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

    bool claim(const NativeGroup& group, Owner owner, nb::handle param, nb::handle grad,
               nb::dict state, nb::dict known, nb::set seen, nb::handle selection,
               nb::object& indices) {
        const nb::object id = nb::steal(PyLong_FromVoidPtr(param.ptr()));
        PyObject* const memory = find(known, id);
        PlainTensor own;
        // Seen already: a parameter that is given twice.
        if (!names().exchange || !memory || contains(seen, id) || !own.read_rows(param) ||
            own.numel() == 0 || nb::len(memory) < 2 || nb::handle(memory)[0].ptr() != param.ptr() ||
            !is_address(nb::handle(memory)[1], own.data()) || is_true(param, names().is_neg)) {
            return false;
        }
        Job job{};
        if (!read_standard_grad(own, grad, selection, group.dense_slots(), job, indices, alive_,
                                joined_) ||
            !has_row_slots(group, own, job)) {
            return false;
        }
        if (job.packed.words && !can_run_packed(group, job)) return false;
        const auto view = own.view(job.slot_size);
        if (!view) return false;
        job.param = *view;
        StepCount count;
        if (!read_state(group, param, own, state, memory, job, count)) return false;
        if (count.value < 0 || (group.step && group.step != count.value + 1)) return false;
        group.write_to(job, count.value + 1);
        if (!finish(job, group, std::move(owner))) return false;
        keep_alive(group);
        if (group.counts) counts_.push_back(std::move(count));
        written_.append(param);
        if (PySet_Add(seen.ptr(), id.ptr())) throw nb::python_error();
        return true;
    }

    bool read_state(const NativeGroup& group, nb::handle param, const PlainTensor& own,
                    nb::dict state, nb::handle memory, Job& job, StepCount& count) {
        const RuleKernel rule = group.kernel(set_, false);
        const int states = rule.states + rule.slot_states;
        count.value = 1;  // where nothing is counted, not the first, for there is a state
        if (states == 0 && !group.counts) return true;
        PyObject* record = find(state, param);
        if (!record || !PyDict_Check(record) || nb::len(memory) != size_t(2 + states)) return false;
        if (group.counts && !count.read(record)) return false;
        for (int s = 0; s < states; ++s) {
            PyObject* tensor = find(record, group.names[size_t(s)]);
            PlainTensor read;
            if (!tensor || !read_state_tensor(tensor, own, rule, s, job, read) ||
                !is_address(memory[size_t(2 + s)], read.data())) {
                return false;
            }
        }
        return true;
    }

    // Whether slots are rows where they have to be.
    static bool has_row_slots(const NativeGroup& group, const PlainTensor& own, const Job& job) {
        return !group.needs_row_slots() || (own.dl.dims > 0 && job.num_slots == own.dl.shape[0]);
    }

    // Whether the kept elements of a dense gradient may be a slot.
    static bool can_run_packed(const NativeGroup& group, const Job& job) {
        return job.values.element_stride == 1 && !(group.program && group.program->phase_count > 1);
    }

    // Reads the s-th state tensor of a parameter.
    bool read_state_tensor(nb::handle tensor, const PlainTensor& own, const RuleKernel& rule, int s,
                           Job& job, PlainTensor& read) {
        const bool per_row = s >= rule.states;
        if (!read.read_rows(tensor)) return false;
        const auto view = read.view(per_row ? 1 : job.slot_size);
        const bool fits = job.packed.words
                              ? read.dl.dims == 1 && read.dl.shape[0] == job.packed.kept
                              : read.has_shape_of(own, per_row ? 1 : own.dl.dims);
        if (!view || !fits) return false;
        (per_row ? job.slot_state[s - rule.states] : job.state[s]) = *view;
        alive_.push_back(nb::borrow(tensor));
        return true;
    }

    // False if the row is too long to be kept until its norm is known.
    bool finish(Job& job, const NativeGroup& group, Owner owner) {
        const RuleKernel rule = group.kernel(set_, false);
        bool in_double = job.values.dtype == Dtype::float64 || job.param.dtype == Dtype::float64;
        for (int s = 0; s < rule.states; ++s) {
            in_double |= !job.has_int8_state && job.state[s].dtype == Dtype::float64;
        }
        for (int s = 0; s < rule.slot_states; ++s) {
            in_double |= job.slot_state[s].dtype == Dtype::float64;
        }
        if (group.constraint.norm > 0 && job.slot_size > max_kept_slot_size) {
            if (!is_direct(job.values, in_double) || !is_direct(job.param, in_double) ||
                job.has_int8_state) {
                return false;
            }
            for (int s = 0; s < rule.states; ++s) {
                if (!is_direct(job.state[s], in_double)) return false;
            }
        }
        job.apply = in_double ? group.kernel(set_, true).apply : rule.apply;
        job.needs_whole_slots = group.needs_row_slots() || job.has_int8_state ||
                                (job.program && job.program->phase_count > 1);
        jobs_.push_back(job);
        owners_.push_back(std::move(owner));
        return true;
    }

    void keep_alive(const NativeGroup& group) {
        if (group.program) alive_.push_back(nb::borrow(nb::find(group)));
    }

    const InstructionSet& set_;
    std::vector<Job> jobs_;
    std::vector<Owner> owners_;
    std::vector<StepCount> counts_;
    std::vector<LastSteps> last_steps_;  // of each job, or none
    std::unique_ptr<Step> step_;         // once it is prepared
    nb::list written_;                   // parameters
    std::vector<nb::object> alive_;
    std::vector<std::unique_ptr<JoinedParts>> joined_;
};

// Reads the selections of a group's masks, for each of its parameters. `masked` has for each the
// parameter and None, or its mask, the mask's version when it was read, and the selection of that
// version. False if a parameter or a mask was replaced, or a mask has changed.
bool read_selections(nb::handle group, nb::handle params, nb::handle masked,
                     std::vector<nb::object>& selections) {
    PyObject* const given = find(group, names().mask);
    const size_t count = nb::len(masked);
    if (!given || nb::len(params) != count) return false;
    const bool listed = PyList_CheckExact(given) || PyTuple_CheckExact(given);
    if (listed ? nb::len(given) != count : count != 1) return false;
    for (size_t i = 0; i < count; ++i) {
        const nb::tuple one = nb::cast<nb::tuple>(masked[i]);
        const nb::object param = params[i];
        const nb::object mask = listed ? nb::object(nb::handle(given)[i]) : nb::borrow(given);
        if (param.ptr() != one[0].ptr() || mask.ptr() != one[1].ptr()) return false;
        if (!mask.is_none() && !get(mask, names().version).equal(one[2])) return false;
        selections.push_back(one[3]);
    }
    return true;
}

// Claims and prepares a step whose groups, masks and tensor addresses are unchanged. Returns false
// otherwise, or if an index is out of range: Python then runs the step or raises. `before` has for
// each group its values, their NativeGroup, and what its masks select, if it has any (see
// read_selections). `grads`, if not None, are those of the first group's parameters from `first`
// on.
bool prepare_replay(NativeStep& jobs, nb::list groups, nb::list before, nb::dict state,
                    nb::dict known, int threads, nb::handle grads, size_t first) {
    const size_t count = nb::len(before);
    if (nb::len(groups) != count) return false;
    nb::set seen;
    for (size_t i = 0; i < count; ++i) {
        const nb::object group = groups[i];
        const nb::tuple was = nb::cast<nb::tuple>(before[i]);
        if (!has_same_values(group, was[0])) return false;
        PyObject* const params = find(group, names().params);
        if (!params || !PyList_CheckExact(params)) return false;
        const NativeGroup& says = nb::cast<const NativeGroup&>(was[1]);
        std::vector<nb::object> selections;
        if (!was[2].is_none() && !read_selections(group, params, was[2], selections)) return false;
        if (!jobs.claim_all(says, params, state, known, seen, selections, grads, first)) {
            return false;
        }
    }
    return !jobs.try_prepare(threads);
}

// Replays a step. Returns false, with nothing written, if prepare_replay does.
bool replay_step(int instruction_set, nb::list groups, nb::list before, nb::dict state,
                 nb::dict known, int threads, nb::handle grads, size_t first) {
    NativeStep jobs(instruction_set);
    if (!prepare_replay(jobs, groups, before, state, known, threads, grads, first)) return false;
    jobs.commit();
    return true;
}

// Prepares to replay a step with dense semantics, in which no row is deferred that gets a gradient.
// `deferred` has for each parameter with a gradient itself and its LastSteps.
bool prepare_dense_replay(NativeStep& jobs, nb::list groups, nb::list before, nb::dict state,
                          nb::dict known, int threads, nb::list deferred) {
    return prepare_replay(jobs, groups, before, state, known, threads, nb::none(), 0) &&
           jobs.set_last_steps(deferred, threads);
}

// Updates one parameter with a gradient, state and step number that the caller passes. Returns
// false, with nothing written, unless all have their standard form and are valid.
bool apply_standard(int instruction_set, const NativeGroup& group, nb::handle param,
                    nb::handle grad, nb::list state, nb::handle step, int threads) {
    StepCount count;
    if (!count.read_count(step) || !count.is_whole() || count.value < 1) return false;
    NativeStep jobs(instruction_set);
    if (!jobs.claim_one(group, param, grad, state, count.value) || jobs.try_prepare(threads)) {
        return false;
    }
    jobs.commit();
    return true;
}

}  // namespace
}  // namespace sparsestep
