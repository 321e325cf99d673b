// Masks over elements as bits, with ranks: see PackedMask in types.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/types.h"

namespace sparsestep {

// Fills in words and ranks of a mask. Returns how many elements it keeps.
inline int64_t pack_mask(const bool* mask, int64_t numel, uint64_t* words, int64_t* ranks) {
    int64_t kept = 0;
    for (int64_t word = 0; word * 64 < numel; ++word) {
        if (word % rank_words == 0) ranks[word / rank_words] = kept;
        const int64_t rest = numel - word * 64;
        unsigned char bytes[64] = {};
        std::memcpy(bytes, mask + word * 64, size_t(rest < 64 ? rest : 64));
        uint64_t bits = 0;
        for (int i = 0; i < 8; ++i) {
            uint64_t eight;
            std::memcpy(&eight, bytes + 8 * i, 8);
            // The products that reach the last byte are one bit of each of the eight.
            bits |= (eight * 0x0102040810204080u >> 56) << (8 * i);
        }
        words[word] = bits;
        kept += __builtin_popcountll(bits);
    }
    return kept;
}

}  // namespace sparsestep
