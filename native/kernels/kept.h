// The elements that a mask keeps, in order, and the state that has values for these alone.
//
// Internal linkage throughout: see types.h.
#pragma once

#include <cstdint>

#include "core/compiler.h"
#include "core/types.h"

namespace sparsestep {
namespace {

// How many elements a mask keeps before this one.
inline int64_t rank_of(const PackedMask& mask, int64_t element) {
    const int64_t word = element / 64;
    int64_t rank = mask.ranks[word / rank_words];
    for (int64_t w = word / rank_words * rank_words; w < word; ++w) {
        rank += __builtin_popcountll(mask.words[w]);
    }
    const uint64_t before = (uint64_t(1) << (element % 64)) - 1;
    return rank + __builtin_popcountll(mask.words[word] & before);
}

// Clears the lowest bits that are set.
inline uint64_t without_lowest(uint64_t bits, int64_t count) {
    for (; count > 0; --count) bits &= bits - 1;
    return bits;
}

// A kept element: its rank, and its word without the bits before it.
struct MaskCursor {
    int64_t rank = -1, word = 0;
    uint64_t bits = 0;

    static MaskCursor at(const PackedMask& mask, int64_t rank) {
        int64_t low = 0, high = (mask.numel + 64 * rank_words - 1) / (64 * rank_words);
        while (high - low > 1) {
            const int64_t middle = low + (high - low) / 2;
            (mask.ranks[middle] <= rank ? low : high) = middle;
        }
        int64_t word = low * rank_words, left = rank - mask.ranks[low];
        for (int64_t count; left >= (count = __builtin_popcountll(mask.words[word])); ++word) {
            left -= count;
        }
        return {rank, word, without_lowest(mask.words[word], left)};
    }
};

// Calls visit(j, rank) for the kept ones of n elements from `first` on: the j-th of them, counted
// from 0, and how many the mask keeps before it.
template <class Visit>
SPARSESTEP_INLINE void for_each_kept(const PackedMask& mask, int64_t first, int64_t n,
                                     const Visit& visit) {
    int64_t rank = rank_of(mask, first);
    for (int64_t j = 0; j < n;) {
        const int64_t bit = (first + j) % 64, rest = n - j;
        const int64_t length = rest < 64 - bit ? rest : 64 - bit;
        uint64_t bits = mask.words[(first + j) / 64] >> bit;
        if (length < 64) bits &= (uint64_t(1) << length) - 1;
        for (; bits; bits &= bits - 1) visit(j + __builtin_ctzll(bits), rank++);
        j += length;
    }
}

}  // namespace
}  // namespace sparsestep
