// State stored as int8: a code for each element, a scale for each row. What a code stands for, and
// why, is in src/sparsestep/contract/int8.py; this is its twin, with the same codes.
//
// Included by kernels.cpp alone; everything has internal linkage (see types.h for the reason).
#pragma once

#include <cstring>
#include <limits>
#include <type_traits>

#include "core/types.h"
#include "kernels/rows.h"
#include "rules/math.h"

namespace sparsestep {
namespace {

// Below this the reciprocal of a scale is infinite; such a row is taken for zero.
constexpr float least_scale = 1e-37f;

// Random bits for codes. Half precision has some of its own for every element; a code is done with
// so soon that making them would take most of the time. Here a row, or a tile of a longer one, has
// 32 of its own: where in a table it begins, and by which bits the table's are turned.
struct Chances {
    static constexpr int starts = 1024;
    uint16_t bits[starts + tile_size];

    constexpr Chances() : bits() {
        const Randomness random(0, 0);
        for (int i = 0; i < starts + tile_size; ++i) bits[i] = uint16_t(random(i));
    }
};
constexpr Chances chances;

template <class T>
struct CodedRows {
    // A slot is encoded when all of it is known.
    static constexpr int64_t kept_columns = max_coded_block;

    Codes codes;
    int64_t block;
    Randomness random;

    CodedRows(const View&, const Job& job, const Piece&, int tensor)
        : codes(job.codes[tensor > 0 ? tensor - 1 : 0]),
          block(job.block),
          random(job.seed, tensor) {}

    T* load(int64_t row, int64_t offset, int64_t n, T* tile) const {
        const int8_t* const from = codes.data + row * block + offset;
        const T scale = T(codes.scale[row]);
        if (codes.root) {
            for (int64_t j = 0; j < n; ++j) {
                const T root = T(int32_t(from[j]) + 128) * scale;
                const T square = root * root;
                tile[j] = square * square;
            }
        } else {
            for (int64_t j = 0; j < n; ++j) {
                const T root = T(int32_t(from[j])) * scale;
                const T square = root * root;
                tile[j] = (root < 0 ? -square : square) * square;
            }
        }
        return tile;
    }
    void store(int64_t, int64_t, int64_t, const T*) const {}

    void finish(int64_t row, int64_t columns, const T* values) const {
        const float scale = scale_for(values, columns);
        codes.scale[row] = scale;
        int8_t* const to = codes.data + row * block;
        if (scale != scale) {  // one number that is none makes the whole row so
            std::memset(to, 0, size_t(columns));
            return;
        }
        const T inverse = scale == 0 ? T(0) : T(1) / T(scale) * T(one);
        const int64_t tiles = (block + tile_size - 1) / tile_size;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const uint32_t own = random(row * tiles + tile);
            const int64_t offset = tile * tile_size, rest = columns - offset;
            const int64_t n = rest < tile_size ? rest : tile_size;
            const uint16_t* const from = chances.bits + own % Chances::starts;
            if (codes.root) {
                encode<true>(values + offset, inverse, from, own >> 16, n, to + offset);
            } else {
                encode<false>(values + offset, inverse, from, own >> 16, n, to + offset);
            }
        }
    }

    SPARSESTEP_INLINE void prefetch(int64_t row) const {
        const char* const at = reinterpret_cast<const char*>(codes.data + row * block);
        const int64_t bytes = block < prefetch_bytes ? block : prefetch_bytes;
        for (int64_t byte = 0; byte < bytes; byte += cache_line) {
            __builtin_prefetch(at + byte, 0, 2);
        }
        // The row need not begin with a cache line, so its end may be in one more.
        __builtin_prefetch(at + bytes - 1, 0, 2);
        __builtin_prefetch(codes.scale + row, 0, 2);
    }

private:
    // The bits of numbers above zero are in their order, those of infinity and of what is not a
    // number above all others; and a largest integer is found in any order, many at a time.
    float scale_for(const T* values, int64_t n) const {
        using Word = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
        constexpr Word sign = std::numeric_limits<Word>::min();
        const Word infinite = bits_as<Word>(std::numeric_limits<T>::infinity());
        Word largest = 0;
        for (int64_t j = 0; j < n; ++j) {
            const Word size = bits_as<Word>(values[j]) & ~sign;
            largest = size > largest ? size : largest;
        }
        if (largest >= infinite) return std::numeric_limits<float>::quiet_NaN();
        const T size = bits_as<T>(largest);
        // A little more than there are codes, so that the largest value is below the last.
        const T most = codes.root ? T(254.99) : T(126.99);
        const float scale = float(square_root(square_root(size)) / most);
        return scale < least_scale ? 0.0f : scale;
    }

    static constexpr int32_t one = 65536;  // a code, in the steps in which it is rounded

    template <bool root>
    static void encode(const T* __restrict values, T inverse, const uint16_t* __restrict chance,
                       uint32_t turned, int64_t n, int8_t* __restrict to) {
        const int32_t turn = int32_t(turned);
        for (int64_t j = 0; j < n; ++j) {
            int32_t code;
            const T size = square_root(square_root(magnitude(values[j]))) * inverse;
            if constexpr (root) {
                const T least = values[j] > 0 ? T(one) : T(0);
                code = int32_t(size > least ? size : least);
            } else {
                code = int32_t((values[j] < 0 ? -size : size) + T(128 * one));
            }
            to[j] = int8_t(((code + (int32_t(chance[j]) ^ turn)) >> 16) - 128);
        }
    }
};

}  // namespace
}  // namespace sparsestep
