// The module that Python sees. With the headers beside it, which it alone includes, this is all
// that knows Python. Nothing is converted or copied on the way.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <vector>

#include "core/csr.h"
#include "core/instruction_sets.h"
#include "core/masks.h"
#include "core/threads.h"
#include "python/catch_up.h"
#include "python/lookup.h"
#include "python/round_robin.h"
#include "python/row_writes.h"
#include "python/step.h"
#include "python/storage.h"
#include "python/strings.h"
#include "python/vocabulary.h"

namespace nb = nanobind;
using namespace sparsestep;

namespace {

// See slots_of; all tensors int64, contiguous, on the CPU.
bool run_slots_of(nb::object starts, nb::object others, int64_t block_rows, int64_t row_slots,
                  nb::object indices, nb::object value_index, int threads) {
    const int64_t groups = numel(starts) - 1, entries = numel(others);
    if (groups < 0 || numel(indices) != entries * block_rows)
        throw nb::value_error("no such slots");
    const CompressedSlots from{integers(starts), integers(others), groups,
                               entries,          block_rows,       row_slots};
    int64_t* const to = static_cast<int64_t*>(address(indices));
    int64_t* const rows =
        value_index.is_none() ? nullptr : static_cast<int64_t*>(address(value_index));
    nb::gil_scoped_release release;
    return slots_of(from, to, rows, threads);
}

// See pack_mask; all tensors contiguous, on the CPU.
int64_t run_pack_mask(nb::object mask, nb::object words, nb::object ranks) {
    const int64_t count = numel(mask), word_count = (count + 63) / 64;
    if (numel(words) != word_count || numel(ranks) != (word_count + rank_words - 1) / rank_words) {
        throw nb::value_error("no such words");
    }
    const bool* const from = static_cast<const bool*>(address(mask));
    uint64_t* const bits = static_cast<uint64_t*>(address(words));
    int64_t* const before = static_cast<int64_t*>(address(ranks));
    nb::gil_scoped_release release;
    return pack_mask(from, count, bits, before);
}

// See repack. Masks are as read_packed reads them, or None for all elements; all tensors
// contiguous, on the CPU, in pairs with the size of a value.
void run_repack(nb::object old_mask, nb::object new_mask, int64_t count, nb::list pairs,
                int threads) {
    PackedMask old{}, now{};
    if (!old_mask.is_none()) read_packed(old_mask, count, old);
    if (!new_mask.is_none()) read_packed(new_mask, count, now);
    if (!old.words && !now.words) throw nb::value_error("there must be a mask");
    std::vector<RepackedValues> values;
    for (nb::handle pair : pairs) {
        const nb::handle from = pair[0], to = pair[1];
        const int64_t bytes = nb::cast<int64_t>(pair[2]);
        if (numel(from) != (old.words ? old.kept : count) ||
            numel(to) != (now.words ? now.kept : count) ||
            (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8 && bytes != 16)) {
            throw nb::value_error("no such values");
        }
        values.push_back(
            {static_cast<const char*>(address(from)), static_cast<char*>(address(to)), bytes});
    }
    nb::gil_scoped_release release;
    repack(old, now, count, values, threads);
}

// The norm of every slot of a gradient, at the number of its first entry; zero elsewhere. None if
// the core cannot read its parts; the index that is out of range, if there is one.
nb::object run_norms(nb::tuple parts, int order, nb::object norms, int threads,
                     int instruction_set) {
    const InstructionSet& set = instruction_set_of(instruction_set);
    Job job{};
    std::vector<std::unique_ptr<JoinedParts>> joined;
    if (nb::len(parts) > 1) {
        job.num_slots = nb::cast<int64_t>(parts[0][2]);
        job.slot_size = nb::cast<int64_t>(parts[0][3]);
        if (!names().exchange || !read_parts(parts, job.num_slots, job.slot_size, job, joined)) {
            return nb::none();
        }
    } else {
        const nb::tuple grad = nb::cast<nb::tuple>(parts[0]);
        if (nb::len(grad) != 7 || !grad[6].is_none()) throw nb::value_error("no such gradient");
        if (!read_gradient(grad, job) || job.all_slots) return nb::none();
    }
    if (numel(norms) != job.entries) throw nb::value_error("there must be a norm for each entry");
    job.needs_whole_slots = true;
    job.order = Norm(order);
    job.norms = static_cast<double*>(address(norms));
    const bool in_double = job.values.dtype == Dtype::float64;
    job.apply = (in_double ? set.in_double : set.in_float).norms;
    std::optional<OutOfRange> bad;
    {
        nb::gil_scoped_release release;
        bad = step(&job, 1, threads);
    }
    return nb::make_tuple(bad ? nb::object(nb::int_(bad->index)) : nb::none());
}

nb::dict rules() {
    nb::dict result;
    const Kernels kernels = instruction_sets()[0].in_float;
    for (int i = 0; i < kernels.rule_count; ++i) {
        const RuleKernel& rule = kernels.rules[i];
        result[rule.name] = nb::make_tuple(i, rule.states, rule.slot_states, rule.options);
    }
    return result;
}

nb::list idle_update_names() {
    nb::list result;
    const Kernels kernels = instruction_sets()[0].in_float;
    for (int i = 0; i < kernels.idle_update_count; ++i) result.append(kernels.idle_updates[i].name);
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

NB_MODULE(_C, module) {
    // Optimizers may live until the interpreter ends, and Groups with them.
    nb::set_leak_warnings(false);
    install_fork_handler();
    module.doc() = "The native engine's core. Use it through sparsestep.engines.native.";
    nb::class_<OwnedProgram>(module, "Program", "A formula as the core runs it.")
        .def(nb::init<int, int, int, nb::tuple, nb::bytes>(), nb::arg("states"),
             nb::arg("slot_states"), nb::arg("numbers"), nb::arg("phases"), nb::arg("row_results"));
    nb::class_<NativeGroup>(module, "NativeGroup", "What a param group says about its updates.")
        .def(nb::init<int, nb::tuple, bool, double, double, double, nb::tuple, bool, nb::tuple,
                      bool, std::optional<nb::tuple>>(),
             nb::arg("rule"), nb::arg("names"), nb::arg("counts"), nb::arg("sign"),
             nb::arg("coupled_decay"), nb::arg("decay_factor"), nb::arg("options"),
             nb::arg("stochastic_rounding") = false, nb::arg("signs") = nb::tuple(),
             nb::arg("takes_dense") = true, nb::arg("constraint") = nb::none())
        .def(nb::init<nb::object, nb::tuple, int64_t, double, double, double, nb::tuple, bool,
                      std::optional<nb::tuple>>(),
             nb::arg("program"), nb::arg("names"), nb::arg("step"), nb::arg("sign"),
             nb::arg("coupled_decay"), nb::arg("decay_factor"), nb::arg("numbers"),
             nb::arg("stochastic_rounding"), nb::arg("constraint") = nb::none());
    module.def("replay_step", &replay_step, nb::arg("instruction_set"), nb::arg("groups"),
               nb::arg("cached_plan"), nb::arg("state"), nb::arg("addresses"), nb::arg("threads"),
               nb::arg("grads") = nb::none(), nb::arg("first") = 0,
               "Replay a step whose groups are unchanged; false, and nothing done, otherwise.");
    module.def("apply_standard", &apply_standard, nb::arg("instruction_set"), nb::arg("group"),
               nb::arg("param").none(), nb::arg("grad").none(), nb::arg("state"),
               nb::arg("step").none(), nb::arg("threads"),
               "Update one parameter; false, and nothing done, unless everything is standard.");
    nb::class_<NativeStep>(module, "NativeStep")
        .def(nb::init<int>(), nb::arg("instruction_set"))
        .def("add", &NativeStep::add, nb::arg("group"), nb::arg("step"), nb::arg("grad"),
             nb::arg("param"), nb::arg("states"), nb::arg("seed").none(),
             nb::arg("row_stride").none(), nb::arg("packed").none(), nb::arg("owner"),
             nb::arg("index"),
             "Add a job; false, and nothing added, where the core has no way to run it.")
        .def("try_claim", &NativeStep::try_claim, nb::arg("group"), nb::arg("owner"),
             nb::arg("params"), nb::arg("state"), nb::arg("addresses"), nb::arg("seen"),
             nb::arg("selections").none(), nb::arg("grads").none(), nb::arg("first"),
             nb::arg("claimed").none(),
             "Add jobs for the parameters on the fast path; the numbers of the others.")
        .def("prepare", &NativeStep::prepare, nb::arg("threads"),
             "Do all that may fail and write nothing. Where a position is no slot, return (owner, "
             "number in the group, slots, position).")
        .def("prepare_dense_replay", &prepare_dense_replay, nb::arg("groups"),
             nb::arg("cached_plan"), nb::arg("state"), nb::arg("addresses"), nb::arg("threads"),
             nb::arg("deferred"),
             "Prepare to replay a step with dense semantics; false, and nothing done, otherwise.")
        .def("commit", &NativeStep::commit,
             "Apply what was prepared and count the steps of what was taken. Nothing can fail, and "
             "no signal handler of Python's comes between.");
    module.def("set_compact_class", &set_compact_class, nb::arg("type"),
               "Say which class compact gradients have.");
    bind_catch_up(module);
    bind_round_robin(module);
    bind_storage(module);
    bind_strings(module);
    bind_lookup(module);
    bind_row_writes(module);
    bind_vocabulary(module);
    module.def("slots_of", &run_slots_of, nb::arg("starts"), nb::arg("others"),
               nb::arg("block_rows"), nb::arg("row_slots"), nb::arg("indices"),
               nb::arg("value_index").none(), nb::arg("threads"),
               "Write out the slots of a compressed gradient; false where it is not valid.");
    module.def("pack_mask", &run_pack_mask, nb::arg("mask"), nb::arg("words"), nb::arg("ranks"),
               "Fill in bits and ranks of a mask over elements; how many it keeps.");
    module.def("repack", &run_repack, nb::arg("old").none(), nb::arg("new").none(),
               nb::arg("numel"), nb::arg("pairs"), nb::arg("threads"),
               "Copy the values of elements that two masks keep from the order of one to that of "
               "the other.");
    module.def("norms", &run_norms, nb::arg("parts"), nb::arg("order"), nb::arg("norms"),
               nb::arg("threads"), nb::arg("instruction_set"),
               "Fill in the norm of every slot of a gradient, at its first entry; None where it "
               "cannot, else a tuple with a position that is no slot, or None.");
    module.def("rules", &rules, "name -> (index, states per element, states per slot, options)");
    module.def("idle_updates", &idle_update_names,
               "The idle updates that CatchUp knows, by number.");
    nb::list dtypes;
    for (const char* name : dtype_names) dtypes.append(name);
    module.attr("dtypes") = nb::tuple(dtypes);
    module.def("instruction_sets", &instruction_set_names,
               "(name, available here) from the plainest to the widest");
    module.def("thread_source", &thread_source, "The source of the threads that share the work.");
}
