// Rules that come from Python as programs, compiled once per instruction set: each instruction is a
// loop over a tile, and a row is gone over once for each phase of the program.
//
// Operations round as IEEE 754 says, the same on every instruction set. exp, log and pow are taken
// in double, one by one, by the system's one implementation, so their bits do not depend on the
// width of a vector either.
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/program.h"
#include "core/types.h"
#include "kernels/constraint.h"
#include "kernels/grads.h"
#include "kernels/kernels.h"
#include "kernels/masked.h"
#include "kernels/rows.h"
#include "rules/math.h"

namespace sparsestep {
namespace {

// How much of a row is computed at a time: so little that all registers of a program stay in the
// first-level cache.
constexpr int64_t chunk = 64;

// Runs instructions over tiles of n elements; `fixed`: n, where it is known to the compiler, else
// 0. `to` may be one of the operands.
template <class T, int64_t fixed>
__attribute__((noinline)) void run(const Instruction* at, const Instruction* end, T* const* tiles,
                                   int64_t given) {
    const int64_t n = fixed ? fixed : given;
    for (; at != end; ++at) {
        T* const to = tiles[at->to];
        const T *const a = tiles[at->a], *const b = tiles[at->b], *const c = tiles[at->c];
        const T* const d = tiles[at->d];
#define SPARSESTEP_EACH(expression)                                                      \
    {                                                                                    \
        SPARSESTEP_IVDEP _Pragma("GCC unroll 8") for (int64_t j = 0; j < n; ++j) to[j] = \
            expression;                                                                  \
        break;                                                                           \
    }
        switch (at->code) {
            case Code::add: SPARSESTEP_EACH(a[j] + b[j])
            case Code::sub: SPARSESTEP_EACH(a[j] - b[j])
            case Code::mul: SPARSESTEP_EACH(a[j] * b[j])
            case Code::div: SPARSESTEP_EACH(a[j] / b[j])
            case Code::maximum: SPARSESTEP_EACH(larger(a[j], b[j]))
            case Code::minimum: SPARSESTEP_EACH(smaller(a[j], b[j]))
            case Code::pow: SPARSESTEP_EACH(T(power(double(a[j]), double(b[j]))))
            case Code::lt: SPARSESTEP_EACH(T(a[j] < b[j]))
            case Code::le: SPARSESTEP_EACH(T(a[j] <= b[j]))
            case Code::gt: SPARSESTEP_EACH(T(a[j] > b[j]))
            case Code::ge: SPARSESTEP_EACH(T(a[j] >= b[j]))
            case Code::eq: SPARSESTEP_EACH(T(a[j] == b[j]))
            case Code::ne: SPARSESTEP_EACH(T(a[j] != b[j]))
            case Code::neg: SPARSESTEP_EACH(-a[j])
            case Code::abs: SPARSESTEP_EACH(absolute(a[j]))
            case Code::sign: SPARSESTEP_EACH(sign(a[j]))
            case Code::sqrt: SPARSESTEP_EACH(square_root(a[j]))
            case Code::rsqrt: SPARSESTEP_EACH(T(1) / square_root(a[j]))
            case Code::reciprocal: SPARSESTEP_EACH(T(1) / a[j])
            case Code::exp: SPARSESTEP_EACH(T(exponential(double(a[j]))))
            case Code::log: SPARSESTEP_EACH(T(logarithm(double(a[j]))))
            case Code::copy: SPARSESTEP_EACH(a[j])
            case Code::where: SPARSESTEP_EACH(a[j] != 0 ? b[j] : c[j])
            case Code::mul_add: SPARSESTEP_EACH(a[j] * b[j] + c[j])
            case Code::mul_sub: SPARSESTEP_EACH(a[j] * b[j] - c[j])
            case Code::sub_mul: SPARSESTEP_EACH(c[j] - a[j] * b[j])
            case Code::mul_mul_add: SPARSESTEP_EACH(a[j] * b[j] + c[j] * d[j])
            case Code::mul_div: SPARSESTEP_EACH(a[j] * b[j] / c[j])
            case Code::sub_div: SPARSESTEP_EACH(c[j] - a[j] / b[j])
            case Code::sub_mul_div: SPARSESTEP_EACH(d[j] - a[j] * b[j] / c[j])
            case Code::sqrt_add: SPARSESTEP_EACH(square_root(a[j]) + b[j])
            case Code::sqrt_div: SPARSESTEP_EACH(square_root(a[j]) / b[j])
            case Code::sqrt_div_add: SPARSESTEP_EACH(square_root(a[j]) / b[j] + c[j])
            default: break;  // those that go from tiles to rows or back
        }
#undef SPARSESTEP_EACH
    }
}

// One sum, mean or largest of a row, while it is being taken.
template <class T>
struct RowReduction {
    T lanes[row_lanes];

    void begin(Code code) {
        for (T& lane : lanes) lane = code == Code::amax ? -T(__builtin_inf()) : T(0);
    }
    SPARSESTEP_INLINE void add(Code code, const T* from, int64_t n) {
        if (n == chunk) return add_chunk<chunk>(code, from, n);
        add_chunk<0>(code, from, n);
    }
    T end(Code code, int64_t columns) {
        if (code == Code::amax)
            return fold(lanes, [](T a, T b) SPARSESTEP_LAMBDA { return larger(a, b); });
        const T sum = fold(lanes, [](T a, T b) SPARSESTEP_LAMBDA { return a + b; });
        return code == Code::mean ? sum / T(columns) : sum;
    }

private:
    // `fixed`: n, where it is known to the compiler, else 0.
    template <int64_t fixed>
    __attribute__((noinline)) void add_chunk(Code code, const T* __restrict from, int64_t given) {
        const int64_t n = fixed ? fixed : given;
        if (code == Code::amax) {
            each(from, n, [](T lane, T value) SPARSESTEP_LAMBDA { return larger(value, lane); });
        } else {
            each(from, n, [](T lane, T value) SPARSESTEP_LAMBDA { return lane + value; });
        }
    }
    template <class Take>
    SPARSESTEP_INLINE void each(const T* __restrict from, int64_t n, const Take& take) {
        int64_t j = 0;
        for (; j + row_lanes <= n; j += row_lanes) {
            for (int lane = 0; lane < row_lanes; ++lane) {
                lanes[lane] = take(lanes[lane], from[j + lane]);
            }
        }
        const int rest = int(n - j);
        for (int lane = 0; lane < rest; ++lane) lanes[lane] = take(lanes[lane], from[j + lane]);
    }
};

template <class T, class Rows, bool simple = false, class StateRows = Rows>
class ProgramLoop : GradReader<T, Rows, simple> {
public:
    ProgramLoop(const Job& job, const JobSlice& slice)
        : GradReader<T, Rows, simple>(job, slice),
          program_(*job.program),
          states_(job.program->states),
          element_mask_(job.element_mask),
          packed_(job.packed),
          decay_factor_(T(job.decay_factor)),
          tensors_(job, slice) {
        const int inputs = 2 + states_;
        for (int r = inputs; r < max_tile_registers; ++r) tiles_[r] = registers_[r - inputs];
        for (int r = 0; r < max_row_registers; ++r) row_[r] = row_registers_ + r;
        for (int k = 0; k < program_.numbers; ++k) {
            const T number = T(job.numbers[k]);
            row_registers_[program_.slot_states + k] = number;
            fill(tiles_[inputs + k], number);
        }
    }

    void run() {
        this->for_each_slot(
            false, [this](int64_t slot) SPARSESTEP_LAMBDA { prefetch_slot(slot); },
            [this](const SlotEntries& entries) SPARSESTEP_LAMBDA { update_slot(entries); });
    }

private:
    using Base = GradReader<T, Rows, simple>;
    using Base::columns_, Base::gradient, Base::job_, Base::row_of;

    // The parameter, then the states; those that the program has not are the parameter again.
    struct Tensors {
        Rows param;
        StateRows state[max_states];
        Tensors(const Job& job, const JobSlice& slice)
            : Tensors(job, slice, std::make_index_sequence<max_states>()) {}
        template <size_t... S>
        Tensors(const Job& job, const JobSlice& slice, std::index_sequence<S...>)
            : param(job.param, job, slice, 0),
              state{StateRows(int(S) < job.program->states ? job.state[S] : job.param, job, slice,
                              int(S) + 1)...} {}
    };

    bool has_element_mask() const { return !simple && element_mask_; }
    bool is_constrained() const { return job_.constraint.norm > 0; }
    // Whether a converted row is rounded and stored only once it is constrained.
    bool keeps_param() const { return !Rows::is_direct && is_constrained(); }
    int64_t state_slot(int64_t slot) const {
        const bool is_rank = !simple && packed_.words && !job_.all_slots && !job_.expands_state;
        return is_rank ? rank_of(packed_, slot) : slot;
    }
    int64_t columns() const { return Rows::fixed_columns ? Rows::fixed_columns : columns_; }

    SPARSESTEP_INLINE void prefetch_slot(int64_t slot) const {
        tensors_.param.prefetch(slot);
        const int64_t place = state_slot(slot);
        for (int s = 0; s < states_; ++s) tensors_.state[s].prefetch(place);
        for (int s = 0; s < program_.slot_states; ++s) {
            const TensorView& view = job_.slot_state[s];
            const int64_t byte = slot * view.slot_stride * bytes_of(view.dtype);
            __builtin_prefetch(static_cast<const char*>(view.data) + byte, 0, 2);
        }
    }

    SPARSESTEP_INLINE void update_slot(const SlotEntries& entries) {
        const int64_t slot = entries.slot;
        for (int s = 0; s < program_.slot_states; ++s) {
            row_registers_[s] = load_number<T>(job_.slot_state[s], slot);
        }
        const int last = program_.phase_count - 1;
        const T* known = nullptr;  // the gradient, where it was needed before and is one tile
        for (int p = 0; p < last; ++p) known = reduce(program_.phases[p], entries, known);
        write(program_.phases[last], entries, known);
        for (int s = 0; s < program_.slot_states; ++s) {
            const T value = row_registers_[program_.row_results[s]];
            store_number(job_.slot_state[s], slot, value, job_, states_ + 1 + s);
        }
    }

    // A phase that writes nothing. Returns the gradient where it is one tile.
    const T* reduce(const Phase& phase, const SlotEntries& entries, const T* known) {
        const int64_t slot = entries.slot;
        const T* grad = known;
        run_row(phase);
        RowReduction<T> found[max_reductions];
        int count = 0;
        for (const Instruction* at = phase.tile; at != phase.tile_end; ++at) {
            if (at->code >= Code::mean) found[count++].begin(at->code);
        }
        const Instruction* const reductions = phase.tile_end - count;
        for (int64_t offset = 0; offset < columns(); offset += tile_size) {
            const int64_t n = tile_at(offset);
            T* param = tensors_.param.load(slot, offset, n, param_tile_);
            if (!known) grad = gradient(entries, offset, n, param);
            if (phase.reads & 1 && decay_factor_ != 1) {
                for (int64_t j = 0; j < n; ++j) shrunk_[j] = param[j] * decay_factor_;
                param = shrunk_;
            }
            T* state[max_states];
            for (int s = 0; s < states_; ++s) {
                const bool is_read = phase.reads >> (2 + s) & 1;
                state[s] = is_read ? load_state(s, slot, offset, n) : param_tile_;
            }
            for (int64_t at = 0; at < n; at += chunk) {
                const int64_t length = n - at < chunk ? n - at : chunk;
                look_at(param, grad, state, at);
                run_tile(phase.tile, reductions, length);
                for (int r = 0; r < count; ++r) {
                    found[r].add(reductions[r].code, tiles_[reductions[r].a], length);
                }
            }
        }
        for (int r = 0; r < count; ++r) {
            row_registers_[reductions[r].to] = found[r].end(reductions[r].code, columns());
        }
        return columns() <= tile_size ? grad : nullptr;
    }

    // The last phase.
    SPARSESTEP_INLINE void write(const Phase& phase, const SlotEntries& entries, const T* known) {
        const int64_t slot = entries.slot;
        run_row(phase);
        for (int64_t offset = 0; offset < columns(); offset += tile_size) {
            const int64_t n = tile_at(offset);
            T* const kept = param_tile_ + (keeps_param() ? offset : 0);
            T* const param = tensors_.param.load(slot, offset, n, kept);
            const T* const grad = known ? known : gradient(entries, offset, n, param);
            T* written[1 + max_states] = {param};
            T* const* const state = written + 1;
            for (int s = 0; s < states_; ++s) written[1 + s] = load_state(s, slot, offset, n);
            if (has_element_mask()) keep_tiles(written, 1 + states_, n, before_[0]);
            if (decay_factor_ != 1) multiply_tile(param, decay_factor_, n);
            for (int64_t at = 0; at < n; at += chunk) {
                look_at(param, grad, state, at);
                run_tile(phase.tile, phase.tile_end, n - at < chunk ? n - at : chunk);
            }
            if (has_element_mask()) {
                const bool* const mask = element_mask_ + row_of(entries.first) * columns() + offset;
                restore_tiles(written, 1 + states_, n, before_[0], mask);
            }
            if (!keeps_param()) tensors_.param.store(slot, offset, n, param);
            for (int s = 0; s < states_; ++s) {
                tensors_.state[s].store(state_slot(slot), offset, n, state[s]);
            }
        }
        if (is_constrained()) {
            constrain_slot(job_.constraint, tensors_.param, slot, columns(), param_tile_);
        }
    }

    int64_t tile_at(int64_t offset) const {
        const int64_t rest = columns() - offset;
        return rest < tile_size ? rest : tile_size;
    }
    T* load_state(int s, int64_t slot, int64_t offset, int64_t n) {
        return tensors_.state[s].load(state_slot(slot), offset, n, state_tiles_[s]);
    }
    SPARSESTEP_INLINE void look_at(T* param, const T* grad, T* const* state, int64_t at) {
        tiles_[0] = param + at;
        tiles_[1] = const_cast<T*>(grad) + at;  // no program writes it
        for (int s = 0; s < states_; ++s) tiles_[2 + s] = state[s] + at;
    }
    SPARSESTEP_INLINE void run_tile(const Instruction* begin, const Instruction* end, int64_t n) {
        if (n == chunk) return sparsestep::run<T, chunk>(begin, end, tiles_, n);
        sparsestep::run<T, 0>(begin, end, tiles_, n);
    }

    // What is computed once for the row.
    SPARSESTEP_INLINE void run_row(const Phase& phase) {
        if (phase.row == phase.row_end) return;
        const Instruction* at = phase.row;
        while (at != phase.row_end && at->code != Code::spread) ++at;
        sparsestep::run<T, 1>(phase.row, at, row_, 1);
        for (; at != phase.row_end; ++at) fill(tiles_[at->to], row_registers_[at->a]);
    }
    static void fill(T* tile, T value) {
        for (int64_t j = 0; j < chunk; ++j) tile[j] = value;
    }

    const Program& program_;
    const int states_;
    const bool* const element_mask_;
    const PackedMask packed_;
    const T decay_factor_;
    const Tensors tensors_;
    T* tiles_[max_tile_registers];  // where each register lies
    T* row_[max_row_registers];
    T row_registers_[max_row_registers];
    alignas(cache_line) T registers_[max_tile_registers - 2][chunk];
    alignas(cache_line) T param_tile_[Rows::is_direct ? tile_size : max_kept_slot_size];
    alignas(cache_line) T shrunk_[tile_size];
    alignas(cache_line) T state_tiles_[max_states][tile_size];
    T before_[1 + max_states][tile_size];
};

template <class T>
void apply_program(const Job& job, const JobSlice& slice) {
    if (slice.first_column == slice.last_column) return;  // slots without elements
    bool is_state_stored = !job.expands_state;
    for (int s = 0; s < job.program->states; ++s) is_state_stored &= is_stored_as<T>(job.state[s]);
    if (job.packed.words && job.all_slots) {
        using Kept = MaskedRows<T>;
        if (is_state_stored) return ProgramLoop<T, Kept, false, DirectRows<T, 0>>(job, slice).run();
        return ProgramLoop<T, Kept, false, ConvertedRows<T>>(job, slice).run();
    }
    const bool stored =
        is_state_stored && is_stored_as<T>(job.values) && is_stored_as<T>(job.param);
    if (!stored) return ProgramLoop<T, ConvertedRows<T>>(job, slice).run();
    if constexpr (sizeof(T) == 4) {
        if (is_simple_grad(job)) {
            const bool usual = slice.last_column - slice.first_column == 64;
            if (usual) return ProgramLoop<T, DirectRows<T, 64>, true>(job, slice).run();
            return ProgramLoop<T, DirectRows<T, 0>, true>(job, slice).run();
        }
    }
    ProgramLoop<T, DirectRows<T, 0>>(job, slice).run();
}

}  // namespace

Apply SPARSESTEP_TYPED(programs_)() { return &apply_program<SPARSESTEP_TYPE>; }

}  // namespace sparsestep
