// The gradient of each slot, its entries' rows summed in order of appearance; and its norm, for
// clipping.
//
// Internal linkage throughout: see types.h.
#pragma once

#include <cstring>

#include "core/types.h"
#include "kernels/constraint.h"
#include "kernels/rows.h"
#include "rules/math.h"

namespace sparsestep {
namespace {

// How many entries ahead rows are asked for: long enough to hide a trip to memory. Rows of a single
// cache line are done with so soon that it takes more of them.
constexpr int64_t prefetch_distance = 16;
constexpr int64_t prefetch_distance_narrow = 64;

// Whether a gradient is nothing but indices and rows, as that of an embedding or a bag is. The
// loop that may take it for granted has half as many instructions for a row: short rows wait for
// nothing else.
inline bool is_simple_grad(const Job& job) {
    return !job.all_slots && !job.value_index && !job.scale.data && !job.element_mask &&
           !job.packed.words && !job.maximize && job.coupled_decay == 0;
}

// A slot and its entries: the first, and the numbers of all where there are more.
struct SlotEntries {
    int64_t slot, first;
    const Entry *begin, *end;  // null: the first is all
    int64_t next = -1;         // the entry to prefetch while this one is done; -1: none
};

// The gradients of a slice's slots: for each the sum of its entries' rows. `simple`: see
// is_simple_grad.
template <class T, class Rows, bool simple>
class GradReader {
protected:
    GradReader(const Job& job, const JobSlice& slice)
        : job_(job),
          slice_(slice),
          columns_(slice.last_column - slice.first_column),
          all_slots_(job.all_slots),
          indices_(job.indices),
          value_index_(job.value_index),
          unique_entries_(job.unique_entries),
          groups_(job.groups),
          duplicate_entries_(job.duplicate_entries),
          maximize_(job.maximize),
          coupled_decay_(T(job.coupled_decay)),
          scale_(job.scale),
          values_(job.values, job, slice, -1) {}

    int64_t slot_of(int64_t entry) const { return !simple && all_slots_ ? entry : indices_[entry]; }
    int64_t row_of(int64_t entry) const {
        return !simple && value_index_ ? value_index_[entry] : entry;
    }
    bool has_scale() const { return !simple && scale_.data; }
    bool is_maximized() const { return !simple && maximize_; }
    bool has_decay() const { return !simple && coupled_decay_ != 0; }
    bool has_element_mask() const { return !simple && job_.element_mask; }

    // Calls prefetch(slot) ahead of time and visit(entries) for every slot: first those with one
    // entry, then those with several. `visit` is inlined in two loops where that pays, else in one:
    // it is most of the code. With `spread`, `visit` itself prefetches the entry `next`.
    template <class Prefetch, class Visit>
    SPARSESTEP_INLINE void for_each_slot(bool spread, const Prefetch& prefetch,
                                         const Visit& visit) {
        const bool narrow = columns_ * int64_t(sizeof(T)) <= cache_line;
        const int64_t distance = narrow ? prefetch_distance_narrow : prefetch_distance;
        const auto entry_at = [this](int64_t i) SPARSESTEP_LAMBDA {
            return unique_entries_ ? int64_t(unique_entries_[i]) : i;
        };
        int64_t ahead = slice_.begin;
        const auto unique_slot = [&](int64_t i) SPARSESTEP_LAMBDA {
            const int64_t until = i + distance + (spread ? 0 : 1);
            for (; ahead < slice_.end && ahead < until; ++ahead) {
                prefetch(slot_of(entry_at(ahead)));
                values_.prefetch(row_of(entry_at(ahead)));
            }
            const int64_t entry = entry_at(i);
            const int64_t next = spread && ahead < slice_.end ? entry_at(ahead++) : -1;
            return SlotEntries{slot_of(entry), entry, nullptr, nullptr, next};
        };
        const int64_t first = slice_.first_group, last = slice_.last_group;
        int64_t group_ahead = first;
        const auto duplicate_slot = [&](int64_t i) SPARSESTEP_LAMBDA {
            const Entry* const begin = duplicate_entries_ + groups_[i].begin;
            if (i == first) {
                const DuplicateSlot& end = groups_[last - 1];
                entries_end_ = duplicate_entries_ + end.begin + end.count;
                for (int64_t k = 0; k < prefetch_distance; ++k) prefetch_values(begin + k);
            }
            for (; group_ahead < last && group_ahead <= i + distance; ++group_ahead) {
                prefetch(groups_[group_ahead].slot);
            }
            return SlotEntries{groups_[i].slot, *begin, begin, begin + groups_[i].count};
        };
        if constexpr (Rows::is_direct) {
            for (int64_t i = slice_.begin; i < slice_.end; ++i) visit(unique_slot(i));
            for (int64_t i = first; i < last; ++i) visit(duplicate_slot(i));
        } else {
            const int64_t unique = slice_.end - slice_.begin;
            for (int64_t i = 0; i < unique + last - first; ++i) {
                visit(i < unique ? unique_slot(slice_.begin + i)
                                 : duplicate_slot(first + i - unique));
            }
        }
    }

    SPARSESTEP_INLINE void prefetch_values(const Entry* member) const {
        if (member < entries_end_) values_.prefetch(row_of(*member));
    }

    // The gradient of a slot: the stored row itself where that is all, else the sum of its entries'
    // rows.
    SPARSESTEP_INLINE const T* gradient(const SlotEntries& entries, int64_t offset, int64_t n,
                                        const T* param) {
        if (!entries.begin && !has_scale() && !is_maximized() && !has_decay() &&
            !has_element_mask()) {
            return values_.load(row_of(entries.first), offset, n, sum_);
        }
        sum_entries(entries, offset, n, param);
        return sum_;
    }

    // With maximize the sign is turned, with coupled decay a part of the parameter is added;
    // elements outside the element mask have none. Not inlined: it is the same for every rule.
    __attribute__((noinline)) void sum_entries(const SlotEntries& entries, int64_t offset,
                                               int64_t count, const T* param) {
        const int64_t n = Rows::fixed_columns ? Rows::fixed_columns : count;
        const bool is_first_tile = offset == 0;
        if (entries.begin && is_first_tile) prefetch_values(entries.begin + prefetch_distance);
        const T* row = values_.load(row_of(entries.first), offset, n, sum_);
        if (has_scale()) {
            multiply(entries.first, row, sum_, n);
        } else if (row != sum_) {
            std::memcpy(sum_, row, size_t(n) * sizeof(T));
        }
        for (const Entry* at = entries.begin ? entries.begin + 1 : entries.end; at != entries.end;
             ++at) {
            if (is_first_tile) prefetch_values(at + prefetch_distance);
            const T* addend = values_.load(row_of(*at), offset, n, addend_);
            if (has_scale()) {
                multiply(*at, addend, addend_, n);
                addend = addend_;
            }
            add(sum_, addend, n);
        }
        if (is_maximized()) {
            for (int64_t j = 0; j < n; ++j) sum_[j] = -sum_[j];
        }
        if (has_decay()) {
            for (int64_t j = 0; j < n; ++j) sum_[j] += coupled_decay_ * param[j];
        }
        if (has_element_mask()) {
            const bool* const is_updated = job_.element_mask +
                                           row_of(entries.first) * job_.slot_size +
                                           slice_.first_column + offset;
            for (int64_t j = 0; j < n; ++j) sum_[j] = is_updated[j] ? sum_[j] : T(0);
        }
    }

    // A row times its factor. A product is rounded to the precision of the values: it is then what
    // it would be, had the rows been written out.
    void multiply(int64_t entry, const T* row, T* product, int64_t n) const {
        T factor;
        load_tile(scale_, entry, 0, 1, &factor);
        for (int64_t j = 0; j < n; ++j) product[j] = factor * row[j];
        if (job_.values.dtype != dtype_of<T>) round_tile(job_.values.dtype, n, product);
    }

    SPARSESTEP_INLINE static void add(T* __restrict sum, const T* __restrict row, int64_t n) {
        for (int64_t j = 0; j < n; ++j) sum[j] += row[j];
    }

    const Job& job_;
    const JobSlice slice_;
    const int64_t columns_;
    const bool all_slots_;
    const int64_t* const indices_;
    const int64_t* const value_index_;
    const Entry* const unique_entries_;
    const DuplicateSlot* const groups_;
    const Entry* const duplicate_entries_;
    const Entry* entries_end_ = nullptr;  // of the slice
    const bool maximize_;
    const T coupled_decay_;
    const TensorView scale_;
    const Rows values_;
    alignas(cache_line) T sum_[tile_size];
    alignas(cache_line) T addend_[tile_size];
};

template <class T, class Rows>
class NormLoop : GradReader<T, Rows, false> {
public:
    NormLoop(const Job& job, const JobSlice& slice) : GradReader<T, Rows, false>(job, slice) {}

    void run() {
        this->for_each_slot(
            false, [](int64_t) {},
            [this](const SlotEntries& entries) {
                this->job_.norms[entries.first] = norm(entries);
            });
    }

private:
    double norm(const SlotEntries& entries) {
        double lanes[norm_lanes] = {};
        for (int64_t offset = 0; offset < this->columns_; offset += tile_size) {
            const int64_t rest = this->columns_ - offset;
            const int64_t n = rest < tile_size ? rest : tile_size;
            const T* grad = this->gradient(entries, offset, n, nullptr);
            switch (this->job_.order) {
                case Norm::sum:
                    add_to_lanes(lanes, grad, n, [](double x) { return absolute(x); });
                    break;
                case Norm::squares:
                    add_to_lanes(lanes, grad, n, [](double x) { return x * x; });
                    break;
                case Norm::largest: raise(lanes, grad, n); break;
            }
        }
        double total = lanes[0];
        for (int lane = 1; lane < norm_lanes; ++lane) {
            total = this->job_.order == Norm::largest ? larger(total, lanes[lane])
                                                      : total + lanes[lane];
        }
        return this->job_.order == Norm::squares ? square_root(total) : total;
    }

    static void raise(double* lanes, const T* grad, int64_t n) {
        for (int64_t j = 0; j < n; ++j) lanes[0] = larger(lanes[0], absolute(double(grad[j])));
    }
};

template <class T>
void norms(const Job& job, const JobSlice& slice) {
    if (is_stored_as<T>(job.values)) return NormLoop<T, DirectRows<T, 0>>(job, slice).run();
    return NormLoop<T, ConvertedRows<T>>(job, slice).run();
}

}  // namespace
}  // namespace sparsestep
