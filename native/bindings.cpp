// The only file that knows Python. It takes addresses and shapes that Python's side has checked
// (src/sparsestep/engines/native.py), so nothing is ever converted or copied on the way.
#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

#include "dispatch.h"
#include "step.h"
#include "team.h"

namespace nb = nanobind;
using namespace sparsestep;

namespace {

// Reads the items of a tuple one after the other.
class Reader {
public:
    explicit Reader(nb::handle tuple) : tuple_(tuple.ptr()) {
        if (!PyTuple_Check(tuple_)) throw nb::type_error("a job is a tuple");
    }
    nb::handle next() {
        if (at_ >= PyTuple_GET_SIZE(tuple_)) throw nb::value_error("a job has too few items");
        return PyTuple_GET_ITEM(tuple_, at_++);
    }
    int64_t integer() {
        const int64_t value = PyLong_AsLongLong(next().ptr());
        if (value == -1 && PyErr_Occurred()) throw nb::python_error();
        return value;
    }
    double real() {
        const double value = PyFloat_AsDouble(next().ptr());
        if (value == -1.0 && PyErr_Occurred()) throw nb::python_error();
        return value;
    }
    void* address() { return reinterpret_cast<void*>(integer()); }
    View view() {
        View result;
        result.data = address();
        result.dtype = Dtype(integer());
        result.slot_stride = integer();
        result.element_stride = integer();
        return result;
    }
    bool done() const { return at_ == PyTuple_GET_SIZE(tuple_); }

private:
    PyObject* tuple_;
    Py_ssize_t at_ = 0;
};

// (rule, whole, positions, entries, slots, block, negate, values, param, states...,
// coefficients...), with four numbers for a view: address, dtype, stride of a slot, stride of an
// element.
Job read_job(nb::handle tuple, const KernelTable& kernels) {
    Reader reader(tuple);
    const int64_t index = reader.integer();
    if (index < 0 || index >= kernels.count) throw nb::value_error("no such rule");
    const RuleKernels& rule = kernels.rules[index];
    Job job{};
    job.whole = reader.integer() != 0;
    job.positions = static_cast<const int64_t*>(reader.address());
    job.entries = reader.integer();
    job.slots = reader.integer();
    job.block = reader.integer();
    job.negate = reader.integer() != 0;
    job.values = reader.view();
    job.param = reader.view();
    bool wide = job.values.dtype == Dtype::float64 || job.param.dtype == Dtype::float64;
    for (int s = 0; s < rule.states; ++s) {
        job.state[s] = reader.view();
        wide |= job.state[s].dtype == Dtype::float64;
    }
    for (int c = 0; c < rule.coefficients; ++c) job.coefficients[c] = reader.real();
    if (!reader.done()) throw nb::value_error("a job has too many items");
    job.apply = wide ? rule.apply_double : rule.apply_float;
    return job;
}

const InstructionSet& chosen(int instruction_set) {
    const auto& sets = instruction_sets();
    if (instruction_set < 0 || size_t(instruction_set) >= sets.size() ||
        !sets[size_t(instruction_set)].available) {
        throw nb::value_error("this machine does not have that instruction set");
    }
    return sets[size_t(instruction_set)];
}

nb::object run_step(nb::list jobs, int threads, int instruction_set) {
    const KernelTable& kernels = chosen(instruction_set).kernels;
    std::vector<Job> read;
    read.reserve(nb::len(jobs));
    for (nb::handle job : jobs) read.push_back(read_job(job, kernels));
    std::optional<BadEntry> bad;
    {
        nb::gil_scoped_release release;
        bad = step(read.data(), int64_t(read.size()), threads);
    }
    if (!bad) return nb::none();
    return nb::make_tuple(bad->job, bad->entry, bad->position);
}

// (slots, offsets, entries, param, exp_avg, exp_avg_sq, grads, dim, four coefficients), then where
// the share of each thread ends.
void run_limit(nb::tuple work, nb::tuple shares, int instruction_set) {
    Reader reader(work);
    LimitWork read{};
    read.slots = static_cast<const int64_t*>(reader.address());
    read.offsets = static_cast<const int64_t*>(reader.address());
    read.entries = static_cast<const int64_t*>(reader.address());
    read.param = static_cast<float*>(reader.address());
    read.exp_avg = static_cast<float*>(reader.address());
    read.exp_avg_sq = static_cast<float*>(reader.address());
    read.grads = static_cast<const float*>(reader.address());
    read.dim = reader.integer();
    for (double& coefficient : read.coefficients) coefficient = reader.real();
    if (read.dim % 16 != 0 || read.dim > max_limit_dim) throw nb::value_error("no such dim");
    Reader ends(shares);
    std::vector<int64_t> bounds{0};
    for (size_t i = 0; i < nb::len(shares); ++i) bounds.push_back(ends.integer());
    const Limit limit = chosen(instruction_set).kernels.limit;
    nb::gil_scoped_release release;
    const int threads = int(bounds.size()) - 1;
    parallel(threads, threads,
             [&](int64_t t) { limit(read, bounds[size_t(t)], bounds[size_t(t + 1)]); });
}

nb::dict rules() {
    nb::dict result;
    const KernelTable table = instruction_sets()[0].kernels;
    for (int i = 0; i < table.count; ++i) {
        const RuleKernels& rule = table.rules[i];
        result[rule.name] = nb::make_tuple(i, rule.states, rule.coefficients);
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
    module.def("step", &run_step, nb::arg("jobs"), nb::arg("threads"), nb::arg("instruction_set"),
               "Apply all jobs; or, where a position is no slot, change nothing and return "
               "(job, entry, position) of the first such.");
    module.def("limit", &run_limit, nb::arg("work"), nb::arg("shares"), nb::arg("instruction_set"),
               "What benchmarks are measured against; see native/limit.h.");
    module.def("rules", &rules, "name -> (index, number of states, number of coefficients)");
    module.def("instruction_sets", &instruction_set_names,
               "(name, available here) from the plainest to the widest");
    module.def("team", &team_kind, "whose threads share the work");
}
