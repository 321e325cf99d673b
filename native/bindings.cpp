// The only file that knows Python: reads tensors into jobs, and runs them.
//
// Nothing is converted or copied on the way. A tensor is asked for its address, dtype and strides
// by the methods it has in Python, so this works with every release of torch; what it was made of
// has been checked by Python's side (src/sparsestep/engines/native.py).
#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

#include "dispatch.h"
#include "step.h"
#include "team.h"

namespace nb = nanobind;
using namespace sparsestep;

namespace {

const InstructionSet& chosen(int instruction_set) {
    const auto& sets = instruction_sets();
    if (instruction_set < 0 || size_t(instruction_set) >= sets.size() ||
        !sets[size_t(instruction_set)].available) {
        throw nb::value_error("this machine does not have that instruction set");
    }
    return sets[size_t(instruction_set)];
}

// The names by which tensors are asked, made once.
struct Names {
    PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject* dtype = PyUnicode_InternFromString("dtype");
    PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
    PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
    PyObject* dtypes[4];

    Names() {
        // Never released: Python's own teardown may come first.
        const nb::object torch = nb::module_::import_("torch");
        const char* const known[] = {"float16", "bfloat16", "float32", "float64"};  // as in Dtype
        for (int i = 0; i < 4; ++i) dtypes[i] = nb::object(torch.attr(known[i])).release().ptr();
    }
};

const Names& names() {
    static const Names made;
    return made;
}

nb::object get(nb::handle object, PyObject* name) {
    return nb::steal(nb::detail::getattr(object.ptr(), name));
}

nb::object call(nb::handle object, PyObject* name) {
    PyObject* arguments[] = {object.ptr()};
    PyObject* result = PyObject_VectorcallMethod(name, arguments, 1, nullptr);
    if (!result) throw nb::python_error();
    return nb::steal(result);
}

void* address(nb::handle tensor) {
    return reinterpret_cast<void*>(nb::cast<uintptr_t>(call(tensor, names().data_ptr)));
}

// The tensor as [rows, block]; nothing if it is elsewhere, of another kind, or no two strides
// describe it.
std::optional<View> view(nb::handle tensor, int64_t rows, int64_t block) {
    const Names& name = names();
    const nb::object dtype = get(tensor, name.dtype);
    int code = 0;
    while (code < 4 && dtype.ptr() != name.dtypes[code]) ++code;
    if (code == 4 || get(tensor, name.is_cpu).ptr() != Py_True) return std::nullopt;
    if (call(tensor, name.is_contiguous).ptr() == Py_True) {
        return View{address(tensor), Dtype(code), block, 1};
    }
    try {
        const nb::object strides = tensor.attr("view")(rows, block).attr("stride")();
        return View{address(tensor), Dtype(code), nb::cast<int64_t>(strides[0]),
                    nb::cast<int64_t>(strides[1])};
    } catch (nb::python_error& error) {
        if (!error.matches(PyExc_RuntimeError)) throw;
        return std::nullopt;
    }
}

// The jobs of one step. Keeps the tensors alive that its jobs point to.
class Jobs {
public:
    explicit Jobs(int instruction_set) : kernels_(chosen(instruction_set).kernels) {}

    // False, and nothing added, where the core has no way to run it. Without positions, the
    // gradient is the whole parameter.
    bool add(int rule_index, nb::object positions, nb::object values, nb::object param,
             nb::list states, int64_t slots, int64_t block, bool negate, nb::tuple coefficients) {
        if (rule_index < 0 || rule_index >= kernels_.count) throw nb::value_error("no such rule");
        const RuleKernels& rule = kernels_.rules[rule_index];
        if (nb::len(states) != size_t(rule.states) ||
            nb::len(coefficients) != size_t(rule.coefficients)) {
            throw nb::value_error("a rule was given the wrong number of states or coefficients");
        }
        Job job{};
        job.whole = positions.is_none();
        job.entries = 1;
        if (!job.whole) {
            job.positions = static_cast<const int64_t*>(address(positions));
            job.entries = nb::cast<int64_t>(positions.attr("numel")());
        }
        job.slots = slots;
        job.block = block;
        job.negate = negate;
        bool wide = false;
        const auto read = [&](nb::handle tensor, int64_t rows, View& to) {
            const std::optional<View> found = view(tensor, rows, block);
            if (!found) return false;
            to = *found;
            wide |= to.dtype == Dtype::float64;
            return true;
        };
        if (!read(values, job.entries, job.values) || !read(param, slots, job.param)) return false;
        for (int s = 0; s < rule.states; ++s) {
            if (!read(states[size_t(s)], slots, job.state[s])) return false;
        }
        for (int c = 0; c < rule.coefficients; ++c) {
            job.coefficients[c] = nb::cast<double>(coefficients[size_t(c)]);
        }
        job.apply = wide ? rule.apply_double : rule.apply_float;
        jobs_.push_back(job);
        alive_.push_back(std::move(positions));
        alive_.push_back(std::move(values));
        alive_.push_back(std::move(param));
        alive_.push_back(std::move(states));
        return true;
    }

    nb::object run(int threads) {
        std::optional<BadEntry> bad;
        {
            nb::gil_scoped_release release;
            bad = step(jobs_.data(), int64_t(jobs_.size()), threads);
        }
        if (!bad) return nb::none();
        return nb::make_tuple(bad->job, bad->entry, bad->position);
    }

private:
    KernelTable kernels_;
    std::vector<Job> jobs_;
    std::vector<nb::object> alive_;
};

// What the limit is told: see LimitWork. `shares` is where the share of each thread ends.
void run_limit(nb::tuple work, nb::tuple shares, int instruction_set) {
    size_t at = 0;
    const auto next = [&] { return nb::cast<int64_t>(work[at++]); };
    const auto pointer = [&] { return reinterpret_cast<void*>(next()); };
    LimitWork read{};
    read.slots = static_cast<const int64_t*>(pointer());
    read.offsets = static_cast<const int64_t*>(pointer());
    read.entries = static_cast<const int64_t*>(pointer());
    read.param = static_cast<float*>(pointer());
    read.exp_avg = static_cast<float*>(pointer());
    read.exp_avg_sq = static_cast<float*>(pointer());
    read.grads = static_cast<const float*>(pointer());
    read.dim = next();
    for (double& coefficient : read.coefficients) coefficient = nb::cast<double>(work[at++]);
    if (read.dim % 16 != 0 || read.dim > max_limit_dim) throw nb::value_error("no such dim");
    std::vector<int64_t> bounds{0};
    for (nb::handle share : shares) bounds.push_back(nb::cast<int64_t>(share));
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
    nb::class_<Jobs>(module, "Jobs")
        .def(nb::init<int>(), nb::arg("instruction_set"))
        .def("add", &Jobs::add, nb::arg("rule"), nb::arg("positions").none(), nb::arg("values"),
             nb::arg("param"), nb::arg("states"), nb::arg("slots"), nb::arg("block"),
             nb::arg("negate"), nb::arg("coefficients"),
             "Add a job; false, and nothing added, where the core has no way to run it.")
        .def("run", &Jobs::run, nb::arg("threads"),
             "Apply all jobs; or, where a position is no slot, change nothing and return "
             "(job, entry, position) of the first such.");
    module.def("limit", &run_limit, nb::arg("work"), nb::arg("shares"), nb::arg("instruction_set"),
               "What benchmarks are measured against; see native/limit.h.");
    module.def("rules", &rules, "name -> (index, number of states, number of coefficients)");
    module.def("instruction_sets", &instruction_set_names,
               "(name, available here) from the plainest to the widest");
    module.def("team", &team_kind, "whose threads share the work");
}
