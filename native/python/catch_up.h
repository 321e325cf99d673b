// Past steps, for rows to catch up with: sparsestep._C.CatchUp. It holds tables of numbers only, so
// it need not be visible to Python's garbage collector.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <optional>

#include "core/history.h"
#include "core/threads.h"
#include "core/types.h"
#include "python/step.h"

namespace sparsestep {
namespace {

// Named like the fields of CatchUpJob.
struct CatchUpCall {
    int idle_update = -1;    // its index in idle_updates()
    int states_per_row = 0;  // how many states there are per row, after those per element
    nb::tuple powers;        // for each state a table, or None
    int buffer = -1, square = -1;
    double buffer_decay = 1, square_decay = 1;
    double eps = 0;
    bool converges = true;
    int64_t horizon = 1;
    nb::object inverse_decay, sizes, roots, centers, sums;  // tables, float64
    nb::tuple options;
    std::optional<nb::tuple> constraint;
    int64_t single_steps = 0;

    // Returns a CatchUpResult as a tuple; None, and nothing done, if the core cannot read a tensor.
    nb::object run(nb::handle param, nb::tuple state, nb::handle rows, nb::handle last,
                   int32_t initial, int32_t now, int32_t base, double max_error, int threads,
                   int instruction_set) const {
        const InstructionSet& set = instruction_set_of(instruction_set);
        if (idle_update < 0 || idle_update >= set.in_float.idle_update_count)
            throw nb::value_error("no such idle update");
        const int64_t num_slots = numel(last), count = rows.is_none() ? num_slots : numel(rows);
        if (!count || !numel(param)) return nb::make_tuple(0, 0);
        CatchUpJob work{};
        work.slot_size = numel(param) / num_slots;
        const std::optional<bool> in_double = read_tensors(work, num_slots, param, state);
        if (!in_double) return nb::none();
        if (constraint && !is_all_direct(work, *in_double)) return nb::none();
        work.rows = integers(rows);
        work.last = static_cast<int32_t*>(own_address(last));
        work.initial = initial;
        work.now = now;
        work.base = base;
        work.max_error = max_error;
        read_history(work);
        const Kernels& kernels = *in_double ? set.in_double : set.in_float;
        const CatchUpResult done =
            run_shares(work, count, threads, kernels.idle_updates[idle_update].catch_up);
        return nb::make_tuple(done.deferred, done.stale);
    }

private:
    // Whether the arithmetic is in double; nothing if the core cannot read a tensor.
    std::optional<bool> read_tensors(CatchUpJob& work, int64_t num_slots, nb::handle param,
                                     const nb::tuple& state) const {
        const int count = int(nb::len(state));
        work.slot_states = states_per_row;
        work.states = count - states_per_row;
        if (work.states < 0 || work.states > 3 || states_per_row < 0 ||
            states_per_row > max_slot_states || nb::len(powers) != size_t(count) ||
            buffer >= work.states || square >= count) {
            throw nb::value_error("no such rule");
        }
        const auto found = view(param, num_slots, work.slot_size);
        if (!found) return std::nullopt;
        work.param = *found;
        bool in_double = found->dtype == Dtype::float64;
        for (int s = 0; s < count; ++s) {
            const bool per_slot = s >= work.states;
            const auto one = view(state[size_t(s)], num_slots, per_slot ? 1 : work.slot_size);
            if (!one) return std::nullopt;
            in_double |= one->dtype == Dtype::float64;
            (per_slot ? work.slot_state[s - work.states] : work.state[s]) = *one;
            const nb::object factors = powers[size_t(s)];
            work.powers[s] = factors.is_none() ? nullptr : table_of(factors);
        }
        return in_double;
    }

    // Steps that are replayed one by one must not round to half precision in between.
    static bool is_all_direct(const CatchUpJob& work, bool in_double) {
        bool all = is_direct(work.param, in_double);
        for (int s = 0; s < work.states; ++s) all = all && is_direct(work.state[s], in_double);
        return all;
    }

    void read_history(CatchUpJob& work) const {
        work.constraint = read_constraint(constraint);
        work.single_steps = single_steps;
        work.buffer = buffer;
        work.square = square;
        work.buffer_decay = buffer_decay;
        work.square_decay = square_decay;
        work.eps = eps;
        work.converges = converges;
        work.horizon = horizon;
        work.inverse_decay = table_of(inverse_decay);
        work.sizes = table_of(sizes);
        work.roots = table_of(roots);
        work.centers = table_of(centers);
        work.sums = table_of(sums);
        work.sums_per_step = numel(sums) / numel(inverse_decay);
        if (square >= 0 && work.sums_per_step != series_terms + 1)
            throw nb::value_error("no such series");
        if (nb::len(options) > size_t(max_options)) {
            throw nb::value_error("no such rule");
        }
        for (size_t c = 0; c < nb::len(options); ++c) {
            work.options[c] = nb::cast<double>(options[c]);
        }
    }

    static const double* table_of(nb::handle tensor) {
        return static_cast<const double*>(own_address(tensor));
    }

    static CatchUpResult run_shares(const CatchUpJob& work, int64_t count, int threads,
                                    CatchUpKernel run) {
        std::atomic<int64_t> deferred{0}, stale{0};
        const auto run_share = [&](const CatchUpSlice& share) {
            const CatchUpResult done = run(work, share);
            deferred += done.deferred;
            stale += done.stale;
        };
        nb::gil_scoped_release release;
        threads = count * work.slot_size < (1 << 14) ? 1 : available_threads(threads);
        if (work.rows) {
            // Before a step, the rows of a lookup are current. Checking takes less time than
            // assigning rows to threads.
            if (LastSteps{work.last, work.initial, work.now}.are_current(work.rows, count, threads))
                return {0, 0};
            parallel(threads, threads, [&](int64_t t) { run_share({0, count, t, threads}); });
        } else {
            constexpr int64_t piece = 4096;
            parallel(threads, (count + piece - 1) / piece, [&](int64_t p) {
                const int64_t end = count < (p + 1) * piece ? count : (p + 1) * piece;
                run_share({p * piece, end, 0, 1});
            });
        }
        return {deferred.load(), stale.load()};
    }
};

// Adds a step to the sums of those before it, as far back as there are powers.
void add_step(nb::handle sums, nb::handle centers, nb::handle buffer_powers, nb::handle root_powers,
              int64_t step, double move, double root) {
    const auto table = [](nb::handle of) { return static_cast<double*>(own_address(of)); };
    const int64_t horizon = numel(buffer_powers), count = step < horizon ? step : horizon;
    const int64_t first = step - count, left_out = horizon - count;
    add_step_to_series({table(centers) + first, table(buffer_powers) + left_out,
                        table(root_powers) + left_out, count, move, root},
                       table(sums) + first * (series_terms + 1));
}

void bind_catch_up(nb::module_& module) {
    module.def("add_step", &add_step, nb::arg("sums"), nb::arg("centers"), nb::arg("buffer_powers"),
               nb::arg("root_powers"), nb::arg("step"), nb::arg("move"), nb::arg("root"),
               "Add a step to the sums of the steps before it.");
    nb::class_<CatchUpCall>(module, "CatchUp", "Past steps, for rows to catch up with.")
        .def(nb::init<>())
        .def_rw("idle_update", &CatchUpCall::idle_update)
        .def_rw("states_per_row", &CatchUpCall::states_per_row)
        .def_rw("powers", &CatchUpCall::powers)
        .def_rw("buffer", &CatchUpCall::buffer)
        .def_rw("square", &CatchUpCall::square)
        .def_rw("buffer_decay", &CatchUpCall::buffer_decay)
        .def_rw("square_decay", &CatchUpCall::square_decay)
        .def_rw("eps", &CatchUpCall::eps)
        .def_rw("converges", &CatchUpCall::converges)
        .def_rw("horizon", &CatchUpCall::horizon)
        .def_rw("inverse_decay", &CatchUpCall::inverse_decay)
        .def_rw("sizes", &CatchUpCall::sizes)
        .def_rw("roots", &CatchUpCall::roots)
        .def_rw("centers", &CatchUpCall::centers)
        .def_rw("sums", &CatchUpCall::sums)
        .def_rw("options", &CatchUpCall::options)
        .def_rw("constraint", &CatchUpCall::constraint, nb::arg().none())
        .def_rw("single_steps", &CatchUpCall::single_steps)
        .def(
            "run", &CatchUpCall::run, nb::arg("param"), nb::arg("state"), nb::arg("rows").none(),
            nb::arg("last"), nb::arg("initial"), nb::arg("now"), nb::arg("base"),
            nb::arg("max_error"), nb::arg("threads"), nb::arg("instruction_set"),
            "Catch up; returns the number of deferred rows, and of rows whose parameter was stale. "
            "None, and nothing done, if the core cannot read a tensor.");
}

}  // namespace
}  // namespace sparsestep
