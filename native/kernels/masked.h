// The elements of a tensor that a mask keeps, one after the other, as if they were a row; and where
// their state is. Words of the mask without a bit cost one comparison, and memory there is not
// read.
//
// Internal linkage throughout: see types.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "core/types.h"
#include "kernels/kept.h"
#include "kernels/rows.h"

namespace sparsestep {
namespace {

// Neighbors whose bits are looked at together.
constexpr int64_t chunk_size = 16;

// How many chunks ahead memory is asked for: gaps between chunks confuse the hardware.
constexpr int64_t prefetch_chunks = 24;

// Moves kept elements between a chunk and a tile. A chunk is whole if these are all that the mask
// keeps of it, and if the tile has chunk_size elements from here on.
template <class Stored, class T>
struct OneByOne {
    SPARSESTEP_INLINE static void load(const Stored* __restrict from, uint32_t bits, bool,
                                       T* __restrict tile) {
        if (bits == 0xffffu) {
            for (int j = 0; j < chunk_size; ++j) tile[j] = Convert<Stored, T>::load(from[j]);
            return;
        }
        for (; bits; bits &= bits - 1)
            *tile++ = Convert<Stored, T>::load(from[__builtin_ctz(bits)]);
    }
    SPARSESTEP_INLINE static void store(Stored* __restrict to, uint32_t bits, bool,
                                        const T* __restrict tile) {
        if (bits == 0xffffu) {
            for (int j = 0; j < chunk_size; ++j) to[j] = Convert<Stored, T>::store(tile[j]);
            return;
        }
        for (; bits; bits &= bits - 1) to[__builtin_ctz(bits)] = Convert<Stored, T>::store(*tile++);
    }
};

template <class Stored, class T>
struct MaskedChunkCopy : OneByOne<Stored, T> {};

#if defined(__AVX512F__)
template <>
struct MaskedChunkCopy<float, float> {
    SPARSESTEP_INLINE static void load(const float* from, uint32_t bits, bool, float* tile) {
        const __m512 found = _mm512_maskz_loadu_ps(__mmask16(bits), from);
        _mm512_mask_storeu_ps(tile, lowest(bits), _mm512_maskz_compress_ps(__mmask16(bits), found));
    }
    SPARSESTEP_INLINE static void store(float* to, uint32_t bits, bool, const float* tile) {
        const __m512 found = _mm512_maskz_loadu_ps(lowest(bits), tile);
        _mm512_mask_storeu_ps(to, __mmask16(bits), _mm512_maskz_expand_ps(__mmask16(bits), found));
    }

private:
    static __mmask16 lowest(uint32_t bits) {
        return __mmask16((1u << __builtin_popcount(bits)) - 1);
    }
};
#elif defined(__AVX2__)
// For each byte of a mask: where its bits are, and how many there are before each place.
struct BytePermutations {
    uint8_t places[256][8] = {}, ranks[256][8] = {};

    constexpr BytePermutations() {
        for (int byte = 0; byte < 256; ++byte) {
            for (int place = 0, rank = 0; place < 8; ++place) {
                ranks[byte][place] = uint8_t(rank);
                if (byte >> place & 1) places[byte][rank++] = uint8_t(place);
            }
        }
    }
};
constexpr BytePermutations byte_permutations;

// No other thread writes the excluded elements of a whole chunk, so they are stored unchanged.
template <>
struct MaskedChunkCopy<float, float> {
    using Rest = OneByOne<float, float>;

    SPARSESTEP_INLINE static void load(const float* from, uint32_t bits, bool whole, float* tile) {
        if (!whole || bits == 0xffffu) return Rest::load(from, bits, whole, tile);
        for (int half = 0; half < 2; ++half, bits >>= 8, from += 8) {
            const __m256i order = widened(byte_permutations.places[bits & 0xff]);
            _mm256_storeu_ps(tile, _mm256_permutevar8x32_ps(_mm256_loadu_ps(from), order));
            tile += __builtin_popcount(bits & 0xff);
        }
    }
    SPARSESTEP_INLINE static void store(float* to, uint32_t bits, bool whole, const float* tile) {
        if (!whole || bits == 0xffffu) return Rest::store(to, bits, whole, tile);
        const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        for (int half = 0; half < 2; ++half, bits >>= 8, to += 8) {
            const __m256i order = widened(byte_permutations.ranks[bits & 0xff]);
            const __m256i here = _mm256_and_si256(_mm256_set1_epi32(int(bits)), each);
            const __m256 kept = _mm256_castsi256_ps(_mm256_cmpeq_epi32(here, each));
            const __m256 spread = _mm256_permutevar8x32_ps(_mm256_loadu_ps(tile), order);
            _mm256_storeu_ps(to, _mm256_blendv_ps(_mm256_loadu_ps(to), spread, kept));
            tile += __builtin_popcount(bits & 0xff);
        }
    }

private:
    static __m256i widened(const uint8_t (&bytes)[8]) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
    }
};
#endif

// A row of kept elements, columns [first_column, last_column) of it, as tiles of T. Tiles are
// loaded in order, so each begins where the last one ended.
template <class T>
struct MaskedRows {
    static constexpr bool is_direct = false;
    static constexpr int64_t fixed_columns = 0;
    TensorView view;
    PackedMask mask;
    int64_t first_column;
    bool stochastic_rounding;
    Randomness random;

    MaskedRows(const TensorView& view, const Job& job, const JobSlice& slice, int tensor)
        : view(view),
          mask(job.packed),
          first_column(slice.first_column),
          stochastic_rounding(job.stochastic_rounding),
          random(job.seed, tensor) {}

    __attribute__((noinline)) T* load(int64_t, int64_t offset, int64_t n, T* tile) const {
        const int64_t rank = first_column + offset;
        if (tile_rank_ != rank) {
            if (next_.rank != rank) next_ = MaskCursor::at(mask, rank);
            tile_rank_ = rank;
            find_chunks(n);
        }
        with_dtype(view, [&](auto* data) {
            using Stored = std::remove_pointer_t<decltype(data)>;
            T* to = tile;
            const int64_t count = count_;
            for (int64_t i = 0; i < count; ++i) {
                __builtin_prefetch(data + chunks_[i + prefetch_chunks], 0, 2);
                const bool whole = i > 0 && tile + n - to >= chunk_size;
                MaskedChunkCopy<Stored, T>::load(data + chunks_[i], bits_[i], whole, to);
                to += __builtin_popcount(bits_[i]);
            }
        });
        return tile;
    }
    // The tile that was loaded last.
    __attribute__((noinline)) void store(int64_t, int64_t, int64_t n, const T* tile) const {
        with_dtype(view, [&](auto* data) {
            using Stored = std::remove_pointer_t<decltype(data)>;
            const T* from = tile;
            const int64_t count = count_;
            for (int64_t i = 0; i < count; ++i) {
                if (stochastic_rounding) {
                    store_at_random(data, chunks_[i], bits_[i], from);
                } else {
                    const bool whole = i > 0 && tile + n - from >= chunk_size;
                    MaskedChunkCopy<Stored, T>::store(data + chunks_[i], bits_[i], whole, from);
                }
                from += __builtin_popcount(bits_[i]);
            }
        });
    }
    SPARSESTEP_INLINE void prefetch(int64_t) const {}  // load() does

private:
    template <class Stored>
    void store_at_random(Stored* to, int64_t chunk, uint32_t bits, const T* tile) const {
        for (; bits; bits &= bits - 1) {
            const int64_t element = chunk + __builtin_ctz(bits);
            to[element] = Convert<Stored, T>::store(*tile++, random(element));
        }
    }

    // Lists the chunks of the next n elements, and moves on. Without branches on single bits: where
    // masks are random, no branch can be predicted.
    void find_chunks(int64_t n) const {
        MaskCursor at = next_;
        int64_t found = 0;
        for (int64_t left = n;;) {
            const int64_t count = __builtin_popcountll(at.bits);
            const uint64_t rest = count > left ? without_lowest(at.bits, left) : 0;
            if (count > 0) found = add_chunks(at.word, at.bits & ~rest, found);
            left -= count;
            if (left <= 0) {
                next_ = {next_.rank + n, at.word, rest};
                break;
            }
            at.bits = mask.words[++at.word];
        }
        count_ = found;
        // The next chunks, to be asked for while these are read.
        const int64_t words = (mask.numel + 63) / 64, last = chunks_[found - 1];
        int64_t ahead = add_chunks(next_.word, next_.bits, found);
        for (int64_t w = next_.word + 1; w < words && ahead < found + prefetch_chunks; ++w) {
            if (mask.words[w]) ahead = add_chunks(w, mask.words[w], ahead);
        }
        for (; ahead < found + prefetch_chunks; ++ahead) chunks_[ahead] = last;
    }
    SPARSESTEP_INLINE int64_t add_chunks(int64_t word, uint64_t bits, int64_t found) const {
        for (int64_t q = 0; q < 64; q += chunk_size) {
            const uint16_t here = uint16_t(bits >> q);
            chunks_[found] = word * 64 + q;
            bits_[found] = here;
            found += here != 0;
        }
        return found;
    }

    mutable MaskCursor next_;  // the element after the latest tile
    mutable int64_t tile_rank_ = -1;
    // The chunks of the latest tile, and some more: their first elements, and which are kept.
    mutable int64_t count_ = 0;
    mutable int64_t chunks_[tile_size + prefetch_chunks + 4];
    mutable uint16_t bits_[tile_size + prefetch_chunks + 4];
};

}  // namespace
}  // namespace sparsestep
