// The module that Python sees. With jobs.h and tensors.h, which it alone includes, this is all that
// knows Python. Nothing is converted or copied on the way.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <vector>

#include "dispatch.h"
#include "jobs.h"
#include "team.h"

namespace nb = nanobind;
using namespace sparsestep;

namespace {

// What the limit is told: see LimitWork. `shares` is where the share of each thread ends. `tensors`
// are the addresses of the parameter and then of the rule's states.
void run_limit(int rule_index, nb::tuple order, nb::tuple tensors, int64_t dim,
               nb::tuple coefficients, nb::tuple shares, int instruction_set) {
    const KernelTable& table = chosen(instruction_set).kernels;
    if (rule_index < 0 || rule_index >= table.count) throw nb::value_error("no such rule");
    const RuleKernels& rule = table.rules[rule_index];
    if (dim % 16 != 0 || dim > max_limit_dim || nb::len(order) != 4 ||
        nb::len(tensors) != size_t(1 + rule.states + rule.slot_states) ||
        nb::len(coefficients) != size_t(rule.coefficients)) {
        throw nb::value_error("no such limit");
    }
    const auto pointer = [](nb::handle number) {
        return reinterpret_cast<void*>(nb::cast<uintptr_t>(number));
    };
    LimitWork work{};
    work.slots = static_cast<const int64_t*>(pointer(order[0]));
    work.offsets = static_cast<const int64_t*>(pointer(order[1]));
    work.entries = static_cast<const int64_t*>(pointer(order[2]));
    work.grads = static_cast<const float*>(pointer(order[3]));
    work.param = static_cast<float*>(pointer(tensors[0]));
    for (int s = 0; s < rule.states; ++s) {
        work.state[s] = static_cast<float*>(pointer(tensors[size_t(1 + s)]));
    }
    for (int s = 0; s < rule.slot_states; ++s) {
        work.slot_state[s] = static_cast<float*>(pointer(tensors[size_t(1 + rule.states + s)]));
    }
    work.dim = dim;
    for (int c = 0; c < rule.coefficients; ++c) {
        work.coefficients[c] = nb::cast<double>(coefficients[size_t(c)]);
    }
    std::vector<int64_t> bounds{0};
    for (nb::handle share : shares) bounds.push_back(nb::cast<int64_t>(share));
    nb::gil_scoped_release release;
    const int threads = int(bounds.size()) - 1;
    parallel(threads, threads,
             [&](int64_t t) { rule.limit(work, bounds[size_t(t)], bounds[size_t(t + 1)]); });
}

nb::dict rules() {
    nb::dict result;
    const KernelTable table = instruction_sets()[0].kernels;
    for (int i = 0; i < table.count; ++i) {
        const RuleKernels& rule = table.rules[i];
        result[rule.name] = nb::make_tuple(i, rule.states, rule.slot_states, rule.coefficients);
    }
    return result;
}

nb::list instruction_set_names() {
    nb::list result;
    for (const InstructionSet& set : instruction_sets()) {
        result.append(nb::make_tuple(set.name, set.available));
    }
    return result;
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "The native engine's core. Use it through sparsestep.engines.native.";
    nb::class_<Jobs>(module, "Jobs")
        .def(nb::init<int>(), nb::arg("instruction_set"))
        .def("add", &Jobs::add, nb::arg("rule"), nb::arg("numbers"), nb::arg("touched"),
             nb::arg("param"), nb::arg("states"), nb::arg("seed").none(),
             "Add a job; false, and nothing added, where the core has no way to run it.")
        .def("take",
             nb::overload_cast<nb::tuple, nb::list, nb::dict, nb::handle, nb::handle, nb::handle>(
                 &Jobs::take),
             nb::arg("group"), nb::arg("params"), nb::arg("state"), nb::arg("settled"),
             nb::arg("seen"), nb::arg("selections").none(),
             "Add jobs for the parameters in the usual form; the numbers of the others.")
        .def("count", &Jobs::count, "Count the step of what was taken; the parameters.")
        .def("run", &Jobs::run, nb::arg("threads"),
             "Apply all jobs; or, where a position is no slot, change nothing and return (tag of "
             "its group or -1, number in the group or among those added, slots, position).");
    module.def("limit", &run_limit, nb::arg("rule"), nb::arg("order"), nb::arg("tensors"),
               nb::arg("dim"), nb::arg("coefficients"), nb::arg("shares"),
               nb::arg("instruction_set"),
               "What benchmarks are measured against; see native/limit.h.");
    module.def("rules", &rules,
               "name -> (index, states per element, states per slot, coefficients)");
    module.def("instruction_sets", &instruction_set_names,
               "(name, available here) from the plainest to the widest");
    module.def("team", &team_kind, "whose threads share the work");
}
