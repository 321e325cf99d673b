// The gradient of each slot of a piece: its entries' rows, summed in order of appearance.
//
// Included by kernels.cpp alone; everything has internal linkage (see types.h for the reason).
#pragma once

#include <cstring>

#include "core/types.h"
#include "kernels/rows.h"

namespace sparsestep {
namespace {

// How many entries ahead rows are asked for: long enough to hide a trip to memory. Rows of a single
// cache line are done with so soon that it takes more of them.
constexpr int64_t prefetch_distance = 16;
constexpr int64_t prefetch_distance_narrow = 64;

// How many further entries of a chain are asked for together with its first; a longer one is asked
// for while it is summed.
constexpr int prefetched_links = 4;

// Whether a gradient is nothing but positions and rows, as that of an embedding is. The loop that
// may take it for granted has half as many instructions for a row: short rows wait for nothing
// else.
inline bool is_plain(const Job& job, const Piece& piece) {
    return !job.whole && !job.source && !job.scale.data && !job.held && !job.negate &&
           job.l2 == 0 && piece.end != heavy_piece;
}

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
          links_(job.links),
          negate_(job.negate),
          l2_(T(job.l2)),
          scale_(job.scale),
          values_(job.values, job, piece, -1) {}

    int64_t slot_of(int64_t entry) const { return !plain && whole_ ? entry : positions_[entry]; }
    int64_t row_of(int64_t entry) const { return !plain && source_ ? source_[entry] : entry; }
    bool has_scale() const { return !plain && scale_.data; }
    bool is_negated() const { return !plain && negate_; }
    bool has_decay() const { return !plain && l2_ != 0; }
    bool is_taken(int64_t entry) const { return links_ && links_[entry] & taken; }
    Link next(int64_t entry) const { return links_ ? links_[entry] & ~taken : chain_end; }

    // Calls prefetch(entry) ahead of time and visit(entry) for every entry that is the first of its
    // slot.
    template <class Prefetch, class Visit>
    SPARSESTEP_INLINE void for_each_slot(const Prefetch& prefetch, const Visit& visit) const {
        const bool heavy = !plain && piece_.end == heavy_piece;
        const int64_t end = heavy ? piece_.begin + 1 : piece_.end;
        const bool narrow = columns_ * int64_t(sizeof(T)) <= cache_line;
        const int64_t distance = narrow ? prefetch_distance_narrow : prefetch_distance;
        int64_t ahead = piece_.begin;
        for (int64_t entry = piece_.begin; entry < end; ++entry) {
            const int64_t until = entry + distance;
            for (; ahead < end && ahead <= until; ++ahead) {
                if (!is_taken(ahead)) prefetch(ahead);
            }
            if (heavy || !is_taken(entry)) visit(entry);
        }
    }

    SPARSESTEP_INLINE void prefetch_values(int64_t entry) const {
        values_.prefetch(row_of(entry));
        Link at = next(entry);
        for (int k = 0; k < prefetched_links && at != chain_end; ++k, at = next(at)) {
            values_.prefetch(row_of(at));
        }
    }

    // The gradient of the slot that `entry` names first: the sum of its chain, or the stored row
    // itself where that is all. With maximize its sign is turned, with coupled decay a part of the
    // parameter is added.
    SPARSESTEP_INLINE const T* gradient(int64_t entry, int64_t offset, int64_t n, const T* param) {
        const T* row = values_.load(row_of(entry), offset, n, sum_);
        const Link second = next(entry);
        if (has_scale()) {
            multiply(entry, row, sum_, n);
        } else {
            if (second == chain_end && !is_negated() && !has_decay()) return row;
            if (row != sum_) std::memcpy(sum_, row, size_t(n) * sizeof(T));
        }
        Link ahead = second;
        for (int k = 0; k < prefetch_distance && ahead != chain_end; ++k) {
            values_.prefetch(row_of(ahead));
            ahead = next(ahead);
        }
        for (Link at = second; at != chain_end; at = next(at)) {
            if (ahead != chain_end) {
                values_.prefetch(row_of(ahead));
                ahead = next(ahead);
            }
            const T* addend = values_.load(row_of(at), offset, n, addend_);
            if (has_scale()) {
                multiply(at, addend, addend_, n);
                addend = addend_;
            }
            add(sum_, addend, n);
        }
        if (is_negated()) {
            for (int64_t j = 0; j < n; ++j) sum_[j] = -sum_[j];
        }
        if (has_decay())
            add_decay(row_of(entry) * job_.block + piece_.first_column + offset, n, param);
        return sum_;
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
    const Link* const links_;
    const bool negate_;
    const T l2_;
    const View scale_;
    const Rows values_;
    alignas(cache_line) T sum_[tile_size];
    alignas(cache_line) T addend_[tile_size];
};

}  // namespace
}  // namespace sparsestep
