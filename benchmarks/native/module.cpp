// The module of the benchmark's limit, as Python sees it.
#include <nanobind/nanobind.h>

#include <vector>

#include "core/cpu.h"
#include "core/threads.h"
#include "limit.h"

namespace nb = nanobind;
using namespace sparsestep;

namespace {

struct InstructionSet {
    const char* name;
    bool available;
    LimitTable limits;
};

// As in core/instruction_sets.cpp.
const std::vector<InstructionSet>& instruction_sets() {
    static const std::vector<InstructionSet> sets = {
#if defined(SPARSESTEP_HAS_BASELINE)
        {"baseline", true, limits_baseline()},
#endif
#if defined(SPARSESTEP_HAS_AVX2)
        {"avx2", has_avx2(), limits_avx2()},
#endif
#if defined(SPARSESTEP_HAS_AVX512)
        {"avx512", has_avx512(), limits_avx512()},
#endif
    };
    return sets;
}

template <class T>
T* pointer(nb::handle address) {
    return reinterpret_cast<T*>(nb::cast<uintptr_t>(address));
}

const LimitTable& limits_of(int instruction_set) {
    const auto& sets = instruction_sets();
    if (instruction_set < 0 || size_t(instruction_set) >= sets.size() ||
        !sets[size_t(instruction_set)].available) {
        throw nb::value_error("this machine does not have that instruction set");
    }
    return sets[size_t(instruction_set)].limits;
}

// See LookupWork. `tensors` are the addresses of its first three fields.
void look_up(nb::tuple tensors, int64_t dim, int64_t per_bag, int64_t bags, int threads,
             int instruction_set) {
    const LimitTable& table = limits_of(instruction_set);
    if (dim % limit_line != 0 || per_bag < 1 || bags < 0 || threads < 1 || nb::len(tensors) != 3) {
        throw nb::value_error("no such lookup");
    }
    const LookupWork work{pointer<const int64_t>(tensors[0]),
                          pointer<const float>(tensors[1]),
                          pointer<float>(tensors[2]),
                          dim,
                          per_bag,
                          bags};
    nb::gil_scoped_release release;
    parallel(threads, threads,
             [&](int64_t t) { table.look_up(work, bags * t / threads, bags * (t + 1) / threads); });
}

// See LimitWork. `order` are the addresses of its first four fields, `tensors` those of the
// parameter and then of the rule's states; `shares` is where the share of each thread ends.
void run(int rule_index, nb::tuple order, nb::tuple tensors, int64_t dim, nb::tuple options,
         double step, nb::tuple shares, int instruction_set) {
    const LimitTable& table = limits_of(instruction_set);
    if (rule_index < 0 || rule_index >= table.count) throw nb::value_error("no such rule");
    const RuleLimit& rule = table.rules[rule_index];
    if (dim % limit_line != 0 || dim > max_limit_dim || nb::len(order) != 4 ||
        nb::len(tensors) != size_t(1 + rule.states + rule.slot_states) ||
        nb::len(options) != size_t(rule.options)) {
        throw nb::value_error("no such limit");
    }
    LimitWork work{};
    work.slots = pointer<const int64_t>(order[0]);
    work.offsets = pointer<const int64_t>(order[1]);
    work.entries = pointer<const int64_t>(order[2]);
    work.grads = pointer<const float>(order[3]);
    work.param = pointer<float>(tensors[0]);
    for (int s = 0; s < rule.states; ++s) work.state[s] = pointer<float>(tensors[size_t(1 + s)]);
    for (int s = 0; s < rule.slot_states; ++s) {
        work.slot_state[s] = pointer<float>(tensors[size_t(1 + rule.states + s)]);
    }
    work.dim = dim;
    for (int i = 0; i < rule.options; ++i) work.options[i] = nb::cast<double>(options[size_t(i)]);
    work.step = step;
    std::vector<int64_t> bounds{0};
    for (nb::handle share : shares) bounds.push_back(nb::cast<int64_t>(share));
    nb::gil_scoped_release release;
    const int threads = int(bounds.size()) - 1;
    parallel(threads, threads,
             [&](int64_t t) { rule.run(work, bounds[size_t(t)], bounds[size_t(t + 1)]); });
}

nb::list rules() {
    nb::list result;
    const LimitTable table = instruction_sets()[0].limits;
    for (int i = 0; i < table.count; ++i) result.append(table.rules[i].name);
    return result;
}

nb::list instruction_set_names() {
    nb::list result;
    for (const InstructionSet& set : instruction_sets()) result.append(set.name);
    return result;
}

}  // namespace

NB_MODULE(_limit, module) {
    install_fork_handler();
    module.doc() = "What benchmarks are measured against; see benchmarks/native/limit.h.";
    module.def("run", &run, nb::arg("rule"), nb::arg("order"), nb::arg("tensors"), nb::arg("dim"),
               nb::arg("options"), nb::arg("step"), nb::arg("shares"), nb::arg("instruction_set"),
               "Update a table by a gradient whose order is known.");
    module.def("look_up", &look_up, nb::arg("tensors"), nb::arg("dim"), nb::arg("per_bag"),
               nb::arg("bags"), nb::arg("threads"), nb::arg("instruction_set"),
               "Sum the rows of bags of as many ids each.");
    module.def("rules", &rules, "The names of the rules, in their order.");
    module.def("instruction_sets", &instruction_set_names, "Their names, in their order.");
}
