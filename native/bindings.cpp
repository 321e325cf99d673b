// The only file that knows Python: reads tensors into jobs, and runs them.
//
// Nothing is converted or copied on the way. A tensor is asked for its address, dtype and strides
// by the methods it has in Python, so this works with every release of torch; what it was made of
// has been checked by Python's side (src/sparsestep/engines/native.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

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
    PyObject* numel = PyUnicode_InternFromString("numel");
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

// The address of an int64 tensor, or null for None.
const int64_t* integers(nb::handle tensor) {
    return tensor.is_none() ? nullptr : static_cast<const int64_t*>(address(tensor));
}

int64_t numel(nb::handle tensor) { return nb::cast<int64_t>(call(tensor, names().numel)); }

// The jobs of one step. Keeps the tensors alive that its jobs point to.
class Jobs {
public:
    explicit Jobs(int instruction_set) : kernels_(chosen(instruction_set).kernels) {}

    // False, and nothing added, where the core has no way to run it. `touched` is what grads.py
    // says it is; `numbers` are (sign of the gradient, l2, shrink, coefficients...).
    bool add(int rule_index, nb::tuple numbers, nb::tuple touched, nb::object param,
             nb::list states, std::optional<uint64_t> seed) {
        if (rule_index < 0 || rule_index >= kernels_.count) throw nb::value_error("no such rule");
        const RuleKernels& rule = kernels_.rules[rule_index];
        if (nb::len(states) != size_t(rule.states + rule.slot_states) ||
            nb::len(numbers) != size_t(3 + rule.coefficients) || nb::len(touched) != 6) {
            throw nb::value_error("a rule was given the wrong number of states or coefficients");
        }
        const auto number = [&](int i) { return nb::cast<double>(numbers[size_t(i)]); };
        Job job{};
        job.positions = integers(touched[0]);
        job.slots = nb::cast<int64_t>(touched[2]);
        job.block = nb::cast<int64_t>(touched[3]);
        job.source = integers(touched[4]);
        job.held = touched[5].is_none() ? nullptr : static_cast<const bool*>(address(touched[5]));
        job.whole = touched[0].is_none();
        job.entries = job.whole ? job.slots : numel(touched[0]);
        job.negate = number(0) < 0;
        job.l2 = number(1);
        job.shrink = number(2);
        job.stochastic = seed.has_value();
        job.seed = seed.value_or(0);
        job.by_slot = rule.slot_states > 0;
        for (int c = 0; c < rule.coefficients; ++c) job.coefficients[c] = number(3 + c);
        bool wide = false;
        const auto read = [&](nb::handle tensor, int64_t rows, int64_t block, View& to) {
            const std::optional<View> found = view(tensor, rows, block);
            if (!found) return false;
            to = *found;
            wide |= to.dtype == Dtype::float64;
            return true;
        };
        const bool by_number = job.source && job.block > 0;
        const int64_t rows = by_number ? numel(touched[1]) / job.block : job.entries;
        if (!read(touched[1], rows, job.block, job.values)) return false;
        if (!read(param, job.slots, job.block, job.param)) return false;
        for (int s = 0; s < rule.states; ++s) {
            if (!read(states[size_t(s)], job.slots, job.block, job.state[s])) return false;
        }
        for (int s = 0; s < rule.slot_states; ++s) {
            nb::handle state = states[size_t(rule.states + s)];
            if (!read(state, job.slots, 1, job.slot_state[s])) return false;
        }
        job.apply = wide ? rule.apply_double : rule.apply_float;
        jobs_.push_back(job);
        alive_.push_back(std::move(touched));
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
        .def("run", &Jobs::run, nb::arg("threads"),
             "Apply all jobs; or, where a position is no slot, change nothing and return "
             "(job, entry, position) of the first such.");
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
