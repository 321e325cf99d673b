// State stored as int8: a code for each element, a scale for each row. src/sparsestep/rules/int8.py
// explains the codes and has the same implementation in torch operations.
//
// Internal linkage throughout: see types.h.
#pragma once

#include <cstring>
#include <limits>

#include "core/types.h"
#include "kernels/kept.h"
#include "kernels/rows.h"

namespace sparsestep {
namespace {

// A code is a truncated float32 between 2 and the largest value of the row: the last bits of its
// exponent and the first three of its mantissa. Below the first exponent bit, 2.0 is all zeros, so
// a shift yields the code.
constexpr int lost_bits = 20;
constexpr int32_t bits_of_two = 0x40000000;
constexpr int exponent_shift = 23;
constexpr int32_t sign_bit = INT32_MIN;

// Random bits for codes. Bits per element, as for half precision, would take longer than encoding.
// Instead each row, or tile of a longer one, has 32 bits: an offset into a table of random numbers,
// and a mask to XOR them with.
struct Int8RandomBits {
    static constexpr int starts = 64, apart = 16;  // a cache line, so that no vector spans two
    alignas(cache_line) int32_t bits[starts * apart + tile_size];

    constexpr Int8RandomBits() : bits() {
        const Randomness random(0, 0);
        for (int i = 0; i < starts * apart + tile_size; ++i) {
            bits[i] = int32_t(random(i) >> (32 - lost_bits));
        }
    }
};
constexpr Int8RandomBits int8_random_bits;

// `fixed`: the number of columns if known at compile time, else 0, as for StoredRows.
template <class T, int64_t fixed>
struct Int8Rows {
    // The scale needs the whole slot.
    static constexpr int64_t kept_columns = fixed ? tile_size : max_kept_slot_size;
    static constexpr bool is_kept() { return !fixed; }
    // Rows take many instructions. Prefetching the next one all at once would stall them, so it is
    // prefetched piece by piece.
    static constexpr bool is_spread() { return true; }

    Int8View codes;
    int64_t slot_size;
    PackedMask packed;
    bool is_expanded;  // tiles have zeros where the mask keeps nothing
    Randomness random;
    RowStride row_stride;

    Int8Rows(const TensorView&, const Job& job, const JobSlice&, int tensor)
        : codes(job.int8_state[tensor > 0 ? tensor - 1 : 0]),
          slot_size(job.slot_size),
          packed(job.packed),
          is_expanded(!fixed && job.expands_state),
          random(job.seed, tensor),
          row_stride(job.row_stride) {}

    SPARSESTEP_INLINE T* load(int64_t row, int64_t offset, int64_t count, T* tile) const {
        int8_t expanded[tile_size];
        const int8_t* from = codes.data + row * codes.stride + offset;
        if (is_expanded) from = expand(row * slot_size + offset, count, expanded);
        if (codes.is_signed) {
            decode<true>(from, scale_of(row), count, tile);
        } else {
            decode<false>(from, scale_of(row), count, tile);
        }
        return tile;
    }
    void store(int64_t, int64_t, int64_t, const T*) const {}

    SPARSESTEP_INLINE void finish(int64_t row, int64_t columns, const T* values) const {
        if (codes.is_signed) {
            encode<true>(row, columns, values);
        } else {
            encode<false>(row, columns, values);
        }
    }

    SPARSESTEP_INLINE void prefetch(int64_t row) const {
        if (is_expanded) return;
        const char* const at = reinterpret_cast<const char*>(codes.data + row * codes.stride);
        const int64_t length = fixed ? fixed : slot_size;
        const int64_t bytes = length < prefetch_bytes ? length : prefetch_bytes;
        for (int64_t byte = 0; byte < bytes; byte += cache_line) {
            __builtin_prefetch(at + byte, 0, 2);
        }
        // An unaligned row may end in one more cache line.
        if (fixed % cache_line || !fixed) __builtin_prefetch(at + bytes - 1, 0, 2);
        __builtin_prefetch(&scale_of(row), 0, 2);
    }

private:
    SPARSESTEP_INLINE float& scale_of(int64_t row) const {
        return codes.scale[row * codes.scale_stride];
    }

    __attribute__((noinline)) const int8_t* expand(int64_t element, int64_t n, int8_t* tile) const {
        std::memset(tile, 0, size_t(n));
        for_each_kept(packed, element, n,
                      [&](int64_t j, int64_t rank) { tile[j] = codes.data[rank * codes.stride]; });
        return tile;
    }
    __attribute__((noinline)) void compress(int64_t element, int64_t n, const int8_t* tile) const {
        for_each_kept(packed, element, n,
                      [&](int64_t j, int64_t rank) { codes.data[rank * codes.stride] = tile[j]; });
    }

    // Not inlined, here and below: shared by all rules.
    template <bool is_signed>
    __attribute__((noinline)) static void decode(const int8_t* __restrict from, float scale,
                                                 int64_t count, T* __restrict tile) {
        const int64_t n = fixed ? fixed : count;
        for (int64_t j = 0; j < n; ++j) {
            const int32_t code = is_signed ? int32_t(from[j]) : int32_t(uint8_t(from[j]));
            const int32_t size = is_signed ? code & 0x7f : code;
            const float value = (bits_as<float>(bits_of_two | (size << lost_bits)) - 2.0f) * scale;
            // Negative codes have the sign bit set, like negative floats.
            tile[j] =
                T(bits_as<float>(bits_as<int32_t>(value) | (is_signed ? code & sign_bit : 0)));
        }
    }

    template <bool is_signed>
    __attribute__((noinline)) void encode(int64_t row, int64_t columns, const T* values) const {
        int8_t* const to = codes.data + row * codes.stride;
        const int32_t largest = largest_size(values, fixed ? fixed : columns);
        if (largest >= bits_as<int32_t>(std::numeric_limits<float>::infinity())) {
            // A NaN or inf poisons the row.
            scale_of(row) = std::numeric_limits<float>::quiet_NaN();
            if (!is_expanded) return void(std::memset(to, 0, size_t(columns)));
            return for_each_kept(packed, row * slot_size, columns, [&](int64_t, int64_t rank) {
                codes.data[rank * codes.stride] = 0;
            });
        }
        // The exponent of the last code, which the largest value, rounded up, does not exceed.
        constexpr int32_t last = is_signed ? 16 : 32;
        int32_t exponent = (largest + (1 << (exponent_shift - 2))) >> exponent_shift;
        exponent = exponent > last ? exponent : last + 1;  // else the scale is subnormal
        scale_of(row) = bits_as<float>((exponent - last) << exponent_shift);
        const float inverse = bits_as<float>((254 + last - exponent) << exponent_shift);

        const int64_t tiles = fixed ? 1 : (columns + tile_size - 1) / tile_size;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const uint32_t own = random(row_stride.row(row) * tiles + tile);
            const int64_t offset = tile * tile_size, rest = columns - offset;
            const int64_t n = fixed ? fixed : rest < tile_size ? rest : tile_size;
            const int32_t* const from =
                int8_random_bits.bits + own % Int8RandomBits::starts * Int8RandomBits::apart;
            int8_t expanded[tile_size];
            encode<is_signed>(values + offset, inverse, from, int32_t(own >> (32 - lost_bits)), n,
                              is_expanded ? expanded : to + offset);
            if (is_expanded) compress(row * slot_size + offset, n, expanded);
        }
    }

    // Positive floats order like their bits, inf and NaN last, and an integer maximum vectorizes.
    SPARSESTEP_INLINE static int32_t largest_size(const T* values, int64_t n) {
        int32_t largest = 0;
        for (int64_t j = 0; j < n; ++j) {
            const int32_t size = size_bits(values[j]);
            largest = size > largest ? size : largest;
        }
        return largest;
    }
    static int32_t size_bits(T value) { return bits_as<int32_t>(float(value)) & ~sign_bit; }

    template <bool is_signed>
    SPARSESTEP_INLINE static void encode(const T* __restrict values, float inverse,
                                         const int32_t* __restrict chance, int32_t turn, int64_t n,
                                         int8_t* __restrict to) {
        // Two loops: in one, the compiler would narrow codes and signs element by element.
        alignas(cache_line) int32_t words[tile_size];
        for (int64_t j = 0; j < n; ++j) {
            const int32_t size = size_bits(values[j]);
            const float scaled = bits_as<float>(size) * inverse + 2.0f;
            const int32_t code = (bits_as<int32_t>(scaled) + (chance[j] ^ turn)) >> lost_bits;
            if constexpr (is_signed) {
                words[j] = code | (bits_as<int32_t>(float(values[j])) >> 24 & 0x80);
            } else {
                // Positive values have at least the code 1.
                const int32_t least = (size < 1 ? size : 1) + (bits_of_two >> lost_bits);
                words[j] = code > least ? code : least;
            }
        }
        for (int64_t j = 0; j < n; ++j) to[j] = int8_t(words[j]);
    }
};

// State in any form: int8 codes, or converted.
template <class T>
struct AnyRows {
    static constexpr int64_t kept_columns = max_kept_slot_size;

    ConvertedRows<T> converted;
    Int8Rows<T, 0> coded;
    bool is_coded;

    AnyRows(const TensorView& view, const Job& job, const JobSlice& slice, int tensor)
        : converted(view, job, slice, tensor),
          coded(view, job, slice, tensor),
          is_coded(job.has_int8_state) {}

    bool is_kept() const { return is_coded; }
    bool is_spread() const { return is_coded; }
    T* load(int64_t row, int64_t offset, int64_t n, T* tile) const {
        return is_coded ? coded.load(row, offset, n, tile) : converted.load(row, offset, n, tile);
    }
    void store(int64_t row, int64_t offset, int64_t n, const T* tile) const {
        if (!is_coded) converted.store(row, offset, n, tile);
    }
    void finish(int64_t row, int64_t columns, const T* values) const {
        if (is_coded) coded.finish(row, columns, values);
    }
    SPARSESTEP_INLINE void prefetch(int64_t row) const {
        is_coded ? coded.prefetch(row) : converted.prefetch(row);
    }
};

}  // namespace
}  // namespace sparsestep
