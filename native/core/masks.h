// Masks over elements as bits, with ranks: see PackedMask in types.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/threads.h"
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

// Values in the order of one mask, and in that of another.
struct RepackedValues {
    const char* from;
    char* to;
    int64_t value_bytes;
};

// Copies the values of elements that both masks keep. A mask without words keeps all of them.
inline void repack(const PackedMask& old, const PackedMask& now, int64_t numel,
                   const std::vector<RepackedValues>& values, int threads) {
    constexpr int64_t elements = 64 * rank_words;
    constexpr int64_t pieces_per_task = 64;
    const int64_t words = (numel + 63) / 64, pieces = (words + rank_words - 1) / rank_words;
    const auto word_of = [](const PackedMask& mask, int64_t word) {
        return mask.words ? mask.words[word] : ~uint64_t(0);
    };
    const auto copy_piece = [&](int64_t piece) {
        int64_t from = old.words ? old.ranks[piece] : piece * elements;
        int64_t to = now.words ? now.ranks[piece] : piece * elements;
        int64_t found = 0, froms[elements], tos[elements];
        const int64_t end = std::min(words, (piece + 1) * rank_words);
        for (int64_t word = piece * rank_words; word < end; ++word) {
            const uint64_t before = word_of(old, word), after = word_of(now, word);
            for (uint64_t both = before & after; both; both &= both - 1) {
                const uint64_t below = (both & (~both + 1)) - 1;
                froms[found] = from + __builtin_popcountll(before & below);
                tos[found++] = to + __builtin_popcountll(after & below);
            }
            from += __builtin_popcountll(before);
            to += __builtin_popcountll(after);
        }
        for (const RepackedValues& each : values) {
            const auto copy = [&](auto value) {
                for (int64_t i = 0; i < found; ++i) {
                    std::memcpy(&value, each.from + froms[i] * sizeof(value), sizeof(value));
                    std::memcpy(each.to + tos[i] * sizeof(value), &value, sizeof(value));
                }
            };
            switch (each.value_bytes) {
                case 1: copy(uint8_t()); break;
                case 2: copy(uint16_t()); break;
                case 4: copy(uint32_t()); break;
                case 8: copy(uint64_t()); break;
                default: copy(std::array<uint64_t, 2>()); break;
            }
        }
    };
    parallel(threads, (pieces + pieces_per_task - 1) / pieces_per_task, [&](int64_t task) {
        const int64_t end = std::min(pieces, (task + 1) * pieces_per_task);
        for (int64_t piece = task * pieces_per_task; piece < end; ++piece) copy_piece(piece);
    });
}

}  // namespace sparsestep
