// The gradient of each slot, its entries' rows summed in order of appearance; and its norm, for
// clipping.
//
// Internal linkage throughout: see types.h.
#pragma once

#include <cstring>

#include "core/types.h"
#include "kernels/rows.h"
#include "rules/math.h"

namespace sparsestep {
namespace {

// How many entries ahead rows are asked for: long enough to hide a trip to memory. Rows of a single
// cache line are done with so soon that it takes more of them.
constexpr int64_t prefetch_distance = 16;
constexpr int64_t prefetch_distance_narrow = 64;

// Whether a gradient is nothing but positions and rows, as that of an embedding or a bag is. The
// loop that may take it for granted has half as many instructions for a row: short rows wait for
// nothing else.
inline bool is_plain(const Job& job) {
    return !job.whole && !job.source && !job.scale.data && !job.held && !job.negate && job.l2 == 0;
}

// A slot and its entries: the first, and the numbers of all where there are more.
struct Touch {
    int64_t slot, first;
    const Entry *begin, *end;  // null: the first is all
    int64_t next = -1;         // the entry to prefetch while this one is done; -1: none
};

// The gradients of a piece's slots: for each the sum of its entries' rows. `plain`: see is_plain.
template <class T, class Rows, bool plain>
class Gradients {
protected:
    Gradients(const Job& job, const Piece& piece)
        : job_(job),
          piece_(piece),
          columns_(piece.last_column - piece.first_column),
          whole_(job.whole),
          positions_(job.positions),
          source_(job.source),
          alone_(job.alone),
          groups_(job.groups),
          members_(job.members),
          negate_(job.negate),
          l2_(T(job.l2)),
          scale_(job.scale),
          values_(job.values, job, piece, -1) {}

    int64_t slot_of(int64_t entry) const { return !plain && whole_ ? entry : positions_[entry]; }
    int64_t row_of(int64_t entry) const { return source_ ? source_[entry] : entry; }
    bool has_scale() const { return !plain && scale_.data; }
    bool is_negated() const { return !plain && negate_; }
    bool has_decay() const { return !plain && l2_ != 0; }
    // Calls prefetch(slot) ahead of time and visit(touch) for every slot: first the entries that
    // are alone, then the groups. One loop, so that `visit` is inlined once. With `spread`, entries
    // that are alone are left to visit to prefetch, as `next`.
    template <class Prefetch, class Visit>
    SPARSESTEP_INLINE void for_each_slot(bool spread, const Prefetch& prefetch,
                                         const Visit& visit) {
        const bool narrow = columns_ * int64_t(sizeof(T)) <= cache_line;
        const int64_t distance = narrow ? prefetch_distance_narrow : prefetch_distance;
        const auto entry_at = [this](int64_t i) { return alone_ ? int64_t(alone_[i]) : i; };
        const int64_t first = piece_.first_group, last = piece_.last_group;
        if (first != last) {
            last_member_ = members_ + groups_[last - 1].begin + groups_[last - 1].count;
        }
        int64_t ahead = piece_.begin, group_ahead = first;
        for (int64_t i = piece_.begin, group = first; i < piece_.end || group < last;) {
            Touch touch{};
            if (i < piece_.end) {
                const int64_t until = i + distance + (spread ? 0 : 1);
                for (; ahead < piece_.end && ahead < until; ++ahead) {
                    prefetch(slot_of(entry_at(ahead)));
                    values_.prefetch(row_of(entry_at(ahead)));
                }
                const int64_t entry = entry_at(i++);
                const int64_t next = spread && ahead < piece_.end ? entry_at(ahead++) : -1;
                touch = {slot_of(entry), entry, nullptr, nullptr, next};
            } else {
                const Entry* const begin = members_ + groups_[group].begin;
                if (group == first) {
                    for (int64_t m = 0; m < prefetch_distance; ++m) prefetch_values(begin + m);
                }
                for (; group_ahead < last && group_ahead <= group + distance; ++group_ahead) {
                    prefetch(groups_[group_ahead].slot);
                }
                touch = {groups_[group].slot, *begin, begin, begin + groups_[group].count};
                ++group;
            }
            visit(touch);
        }
    }

    SPARSESTEP_INLINE void prefetch_values(const Entry* member) const {
        if (member < last_member_) values_.prefetch(row_of(*member));
    }

    // The gradient of a slot: the stored row itself where that is all, else the sum of its entries'
    // rows.
    SPARSESTEP_INLINE const T* gradient(const Touch& touch, int64_t offset, int64_t n,
                                        const T* param) {
        if (!touch.begin && !has_scale() && !is_negated() && !has_decay()) {
            return values_.load(row_of(touch.first), offset, n, sum_);
        }
        sum_entries(touch, offset, n, param);
        return sum_;
    }

    // With maximize the sign is turned, with coupled decay a part of the parameter is added. Not
    // inlined: it is the same for every rule.
    __attribute__((noinline)) void sum_entries(const Touch& touch, int64_t offset, int64_t count,
                                               const T* param) {
        const int64_t n = Rows::fixed_columns ? Rows::fixed_columns : count;
        const bool is_first_tile = offset == 0;
        if (touch.begin && is_first_tile) prefetch_values(touch.begin + prefetch_distance);
        const T* row = values_.load(row_of(touch.first), offset, n, sum_);
        if (has_scale()) {
            multiply(touch.first, row, sum_, n);
        } else if (row != sum_) {
            std::memcpy(sum_, row, size_t(n) * sizeof(T));
        }
        for (const Entry* at = touch.begin ? touch.begin + 1 : touch.end; at != touch.end; ++at) {
            if (is_first_tile) prefetch_values(at + prefetch_distance);
            const T* addend = values_.load(row_of(*at), offset, n, addend_);
            if (has_scale()) {
                multiply(*at, addend, addend_, n);
                addend = addend_;
            }
            add(sum_, addend, n);
        }
        if (is_negated()) {
            for (int64_t j = 0; j < n; ++j) sum_[j] = -sum_[j];
        }
        if (has_decay())
            add_decay(row_of(touch.first) * job_.block + piece_.first_column + offset, n, param);
    }

    // Of a slot that is held in part, only what is held decays. `first` is the number of its first
    // element among those that `held` has.
    void add_decay(int64_t first, int64_t n, const T* param) {
        if (!job_.held) {
            for (int64_t j = 0; j < n; ++j) sum_[j] += l2_ * param[j];
            return;
        }
        const bool* const held = job_.held + first;
        for (int64_t j = 0; j < n; ++j) sum_[j] += held[j] ? l2_ * param[j] : T(0);
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
    const Piece piece_;
    const int64_t columns_;
    const bool whole_;
    const int64_t* const positions_;
    const int64_t* const source_;
    const Entry* const alone_;
    const EntryGroup* const groups_;
    const Entry* const members_;
    const Entry* last_member_ = nullptr;  // of the piece: behind it
    const bool negate_;
    const T l2_;
    const View scale_;
    const Rows values_;
    alignas(cache_line) T sum_[tile_size];
    alignas(cache_line) T addend_[tile_size];
};

template <class T, class Rows>
class NormLoop : Gradients<T, Rows, false> {
public:
    NormLoop(const Job& job, const Piece& piece) : Gradients<T, Rows, false>(job, piece) {}

    void run() {
        this->for_each_slot(
            false, [](int64_t) {},
            [this](const Touch& touch) { this->job_.norms[touch.first] = norm(touch); });
    }

private:
    // In double, so that no square overflows; in as many lanes on every machine, since the order of
    // a sum decides its last bits.
    static constexpr int lanes_count = 8;

    double norm(const Touch& touch) {
        double lanes[lanes_count] = {};
        for (int64_t offset = 0; offset < this->columns_; offset += tile_size) {
            const int64_t rest = this->columns_ - offset;
            const int64_t n = rest < tile_size ? rest : tile_size;
            const T* grad = this->gradient(touch, offset, n, nullptr);
            switch (this->job_.order) {
                case Norm::sum: add(lanes, grad, n, [](double x) { return absolute(x); }); break;
                case Norm::squares: add(lanes, grad, n, [](double x) { return x * x; }); break;
                case Norm::largest: raise(lanes, grad, n); break;
            }
        }
        double total = lanes[0];
        for (int lane = 1; lane < lanes_count; ++lane) {
            total = this->job_.order == Norm::largest ? larger(total, lanes[lane])
                                                      : total + lanes[lane];
        }
        return this->job_.order == Norm::squares ? square_root(total) : total;
    }

    template <class Of>
    SPARSESTEP_INLINE static void add(double* __restrict lanes, const T* __restrict grad, int64_t n,
                                      const Of& of) {
        int64_t j = 0;
        for (; j + lanes_count <= n; j += lanes_count) {
            for (int lane = 0; lane < lanes_count; ++lane)
                lanes[lane] += of(double(grad[j + lane]));
        }
        for (int lane = 0; j < n; ++j, ++lane) lanes[lane] += of(double(grad[j]));
    }

    static void raise(double* lanes, const T* grad, int64_t n) {
        for (int64_t j = 0; j < n; ++j) lanes[0] = larger(lanes[0], absolute(double(grad[j])));
    }
};

template <class T>
void norms(const Job& job, const Piece& piece) {
    if (is_stored_as<T>(job.values)) return NormLoop<T, StoredRows<T, 0>>(job, piece).run();
    return NormLoop<T, ConvertedRows<T>>(job, piece).run();
}

}  // namespace
}  // namespace sparsestep
