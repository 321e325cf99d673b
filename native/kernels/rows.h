// Rows of a tensor as tiles of float or double.
//
// If a row is stored in that form, the tile is the row itself. Otherwise (half precision, strided)
// the tile is a copy in the L1 cache, converted when loaded and rounded when stored. So a rule is
// compiled for two types only.
//
// Internal linkage throughout: see types.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/compiler.h"
#include "core/types.h"
#include "kernels/kept.h"

namespace sparsestep {
namespace {

constexpr int64_t tile_size = 512;

template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps the size");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

// Storage types. The conversions are written without branches on the value, in integer and float
// operations that every instruction set rounds alike, so that the bits never depend on the machine.
struct Bfloat16 {
    uint16_t bits;
    operator float() const { return bits_as<float>(uint32_t(bits) << 16); }
    static Bfloat16 nearest(float value) {
        const uint32_t word = bits_as<uint32_t>(value);
        const uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
        return {uint16_t(value != value ? 0x7fc0u : rounded)};
    }
    // Rounds up with a probability equal to the distance to the lower neighbor: adds 16 random bits
    // to the 16 bits that are cut off.
    static Bfloat16 random(float value, uint32_t bits) {
        const uint32_t rounded = (bits_as<uint32_t>(value) + (bits & 0xffffu)) >> 16;
        return {uint16_t(value != value ? 0x7fc0u : rounded)};
    }
};

struct Float16 {
    uint16_t bits;
    operator float() const {
        const uint32_t sign = uint32_t(bits & 0x8000u) << 16;
        const uint32_t magnitude = uint32_t(bits & 0x7fffu) << 13;
        // Scaling by 2^112 moves the exponent from half's bias to float's and renormalizes
        // subnormals; inf and NaN get the exponent 255 instead.
        const float scaled = bits_as<float>(magnitude) * bits_as<float>(uint32_t(239) << 23);
        const uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
        return bits_as<float>(bits_as<uint32_t>(scaled) | special | sign);
    }
    static Float16 nearest(float value) {
        const uint32_t word = bits_as<uint32_t>(value);
        const uint32_t sign = (word >> 16) & 0x8000u;
        const uint32_t magnitude = word & 0x7fffffffu;
        // Normal results: round to nearest even by integer arithmetic on the shortened mantissa.
        const uint32_t normal =
            (magnitude - (uint32_t(112) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        // Subnormal results: adding 0.5 lets the float adder round at half's last place.
        const uint32_t subnormal =
            bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - bits_as<uint32_t>(0.5f);
        uint32_t half = magnitude < (uint32_t(113) << 23) ? subnormal : normal;
        half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // from 65520 on: infinite
        half = magnitude > 0x7f800000u ? 0x7e00u : half;
        return {uint16_t(half | sign)};
    }
    static Float16 random(float value, uint32_t bits) {
        const uint32_t word = bits_as<uint32_t>(value);
        const uint32_t sign = (word >> 16) & 0x8000u;
        const uint32_t magnitude = word & 0x7fffffffu;
        const uint32_t chance = bits & 0x1fffu;
        const uint32_t normal = (magnitude - (uint32_t(112) << 23) + chance) >> 13;
        // Subnormal results are multiples of 2^-24; larger values are clamped before converting.
        const float few = magnitude < (uint32_t(113) << 23) ? bits_as<float>(magnitude) : 0.0f;
        const float places = few * 16777216.0f + float(int32_t(chance)) * (1.0f / 8192.0f);
        uint32_t half = magnitude < (uint32_t(113) << 23) ? uint32_t(int32_t(places)) : normal;
        half = magnitude >= 0x47800000u || half > 0x7c00u ? 0x7c00u : half;
        half = magnitude > 0x7f800000u ? 0x7e00u : half;
        return {uint16_t(half | sign)};
    }
};

// Random bits for every element of a tensor, a function of key and element alone: the same
// for any order, threads and instruction set. rounding.py has the same in Python.
struct Randomness {
    uint32_t first, second;

    constexpr Randomness(uint64_t seed, int tensor) : first(0), second(0) {
        uint64_t key = seed + uint64_t(tensor + 1) * 0x9e3779b97f4a7c15u;
        key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9u;
        key = (key ^ (key >> 27)) * 0x94d049bb133111ebu;
        key ^= key >> 31;
        first = uint32_t(key);
        second = uint32_t(key >> 32);
    }
    constexpr uint32_t operator()(int64_t element) const {
        uint32_t bits = (uint32_t(element) ^ first) * 0x9e3779b1u;
        bits ^= bits >> 15;
        bits += second + uint32_t(uint64_t(element) >> 32) * 0x85ebca77u;
        bits = (bits ^ (bits >> 16)) * 0x85ebca6bu;
        bits = (bits ^ (bits >> 13)) * 0xc2b2ae35u;
        return bits ^ (bits >> 16);
    }
};

template <class Stored, class T>
struct Convert {
    static T load(Stored stored) { return T(float(stored)); }
    static Stored store(T value) { return Stored::nearest(float(value)); }
    static Stored store(T value, uint32_t bits) { return Stored::random(float(value), bits); }
};
template <class T>
struct Convert<float, T> {
    static T load(float stored) { return T(stored); }
    static float store(T value) { return float(value); }
    static float store(T value, uint32_t) { return float(value); }
};
template <class T>
struct Convert<double, T> {
    static T load(double stored) { return T(stored); }
    static double store(T value) { return double(value); }
    static double store(T value, uint32_t) { return double(value); }
};

template <class T>
constexpr Dtype dtype_of = sizeof(T) == 4 ? Dtype::float32 : Dtype::float64;

// Calls body with a pointer of the view's dtype.
template <class Body>
inline void with_dtype(const TensorView& view, Body body) {
    switch (view.dtype) {
        case Dtype::float16: return body(static_cast<Float16*>(view.data));
        case Dtype::bfloat16: return body(static_cast<Bfloat16*>(view.data));
        case Dtype::float32: return body(static_cast<float*>(view.data));
        case Dtype::float64: return body(static_cast<double*>(view.data));
    }
}

inline int64_t bytes_of(Dtype dtype) {
    return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2;
}

template <class T>
inline bool is_stored_as(const TensorView& view) {
    return view.dtype == dtype_of<T> && view.element_stride == 1;
}

inline int64_t element_offset(const TensorView& view, int64_t slot, int64_t column) {
    return slot * view.slot_stride + column * view.element_stride;
}

// Not inlined, here and below: long code, used by many loops.
template <class T>
__attribute__((noinline)) void load_tile(const TensorView& view, int64_t slot, int64_t column,
                                         int64_t n, T* tile) {
    with_dtype(view, [&](auto* data) {
        using Stored = std::remove_pointer_t<decltype(data)>;
        const Stored* from = data + element_offset(view, slot, column);
        const int64_t stride = view.element_stride;
        if (stride == 1) {
            for (int64_t i = 0; i < n; ++i) tile[i] = Convert<Stored, T>::load(from[i]);
        } else {
            for (int64_t i = 0; i < n; ++i) tile[i] = Convert<Stored, T>::load(from[i * stride]);
        }
    });
}

template <class T>
__attribute__((noinline)) void store_tile(const TensorView& view, int64_t slot, int64_t column,
                                          int64_t n, const T* tile) {
    with_dtype(view, [&](auto* data) {
        using Stored = std::remove_pointer_t<decltype(data)>;
        Stored* to = data + element_offset(view, slot, column);
        const int64_t stride = view.element_stride;
        if (stride == 1) {
            for (int64_t i = 0; i < n; ++i) to[i] = Convert<Stored, T>::store(tile[i]);
        } else {
            for (int64_t i = 0; i < n; ++i) to[i * stride] = Convert<Stored, T>::store(tile[i]);
        }
    });
}

// Rounds a tile to the view's dtype.
template <class T>
__attribute__((noinline)) void round_tile(Dtype dtype, int64_t n, T* tile) {
    with_dtype(TensorView{nullptr, dtype, 0, 0}, [&](auto* none) {
        using Convert = Convert<std::remove_pointer_t<decltype(none)>, T>;
        for (int64_t i = 0; i < n; ++i) tile[i] = Convert::load(Convert::store(tile[i]));
    });
}

// The same with stochastic rounding; `element` is the index of the first element in the tensor.
template <class T>
__attribute__((noinline)) void store_tile(const TensorView& view, int64_t slot, int64_t column,
                                          int64_t n, const T* tile, const Randomness& random,
                                          int64_t element) {
    with_dtype(view, [&](auto* data) {
        using Stored = std::remove_pointer_t<decltype(data)>;
        Stored* to = data + element_offset(view, slot, column);
        const int64_t stride = view.element_stride;
        for (int64_t i = 0; i < n; ++i) {
            to[i * stride] = Convert<Stored, T>::store(tile[i], random(element + i));
        }
    });
}

template <class T>
SPARSESTEP_INLINE void multiply_tile(T* tile, T factor, int64_t n) {
    for (int64_t j = 0; j < n; ++j) tile[j] *= factor;
}

// Restores the elements of a slot that element_mask excludes.
template <class T>
__attribute__((noinline)) void keep_tiles(T* const* tiles, int count, int64_t n, T* kept) {
    for (int t = 0; t < count; ++t) {
        std::memcpy(kept + t * tile_size, tiles[t], size_t(n) * sizeof(T));
    }
}
template <class T>
__attribute__((noinline)) void restore_tiles(T* const* tiles, int count, int64_t n, const T* kept,
                                             const bool* updated) {
    for (int t = 0; t < count; ++t, kept += tile_size) {
        for (int64_t j = 0; j < n; ++j) tiles[t][j] = updated[j] ? tiles[t][j] : kept[j];
    }
}

// A state per slot. Without a conversion it is read and written directly: a call for each would
// take as long as the rest.
template <class T>
inline T load_number(const TensorView& view, int64_t slot) {
    if (view.dtype == dtype_of<T>) return static_cast<const T*>(view.data)[slot * view.slot_stride];
    T number;
    load_tile(view, slot, 0, 1, &number);
    return number;
}
template <class T>
inline void store_number(const TensorView& view, int64_t slot, T number, const Job& job,
                         int tensor) {
    if (view.dtype == dtype_of<T>) {
        static_cast<T*>(view.data)[slot * view.slot_stride] = number;
    } else if (job.stochastic_rounding) {
        const Randomness random(job.seed, tensor);
        store_tile(view, slot, 0, 1, &number, random, job.row_stride.row(slot));
    } else {
        store_tile(view, slot, 0, 1, &number);
    }
}

constexpr int64_t cache_line = 64;

// The hardware prefetches the rest of longer rows.
constexpr int64_t prefetch_bytes = 1024;

// The rows of one tensor, columns [first_column, last_column), as tiles of T. One kind converts,
// the other does not; which one is chosen per slice, not per row. For common numbers of columns,
// `fixed` makes it a compile-time constant (else 0): in short rows, loop overhead counts.
template <class T, int64_t fixed>
struct DirectRows {
    static constexpr bool is_direct = true;
    static constexpr int64_t fixed_columns = fixed;
    static constexpr int64_t kept_columns = tile_size;
    static constexpr bool is_kept() { return false; }
    static constexpr bool is_spread() { return false; }

    char* data;
    int64_t row_bytes;
    int64_t lines;

    DirectRows(const TensorView& view, const Job&, const JobSlice& slice, int)
        : data(static_cast<char*>(view.data) + slice.first_column * int64_t(sizeof(T))),
          row_bytes(view.slot_stride * int64_t(sizeof(T))) {
        const int64_t bytes = (slice.last_column - slice.first_column) * int64_t(sizeof(T));
        lines = ((bytes < prefetch_bytes ? bytes : prefetch_bytes) + cache_line - 1) / cache_line;
    }
    T* load(int64_t row, int64_t offset, int64_t, T*) const {
        return reinterpret_cast<T*>(data + row * row_bytes) + offset;
    }
    void store(int64_t, int64_t, int64_t, const T*) const {}
    void finish(int64_t, int64_t, const T*) const {}

    // Prefetches into the L2 cache. L1 has room for far fewer outstanding requests, and prefetching
    // for writing would go there, too.
    SPARSESTEP_INLINE void prefetch(int64_t row) const {
        const char* at = data + row * row_bytes;
        constexpr int64_t fixed_lines = (fixed * int64_t(sizeof(T)) + cache_line - 1) / cache_line;
        const int64_t count = fixed ? fixed_lines : lines;
        for (int64_t line = 0; line < count; ++line) {
            __builtin_prefetch(at + line * cache_line, 0, 2);
        }
    }
};

template <class T>
struct ConvertedRows {
    static constexpr bool is_direct = false;
    static constexpr int64_t fixed_columns = 0;
    TensorView view;
    int64_t first_column, last_column, slot_size;
    bool stochastic_rounding;
    PackedMask packed;  // of state whose slots are not ranks
    bool is_expanded;   // tiles have zeros where the mask keeps nothing
    bool in_place;      // no conversion; a constrained row is kept until its norm is known
    Randomness random;
    RowStride row_stride;

    ConvertedRows(const TensorView& view, const Job& job, const JobSlice& slice, int tensor)
        : view(view),
          first_column(slice.first_column),
          last_column(slice.last_column),
          slot_size(job.slot_size),
          stochastic_rounding(job.stochastic_rounding),
          packed(tensor > 0 && (job.all_slots || job.expands_state) ? job.packed : PackedMask{}),
          is_expanded(tensor > 0 && job.expands_state),
          in_place(is_stored_as<T>(view) && !is_expanded && !(job.constraint.norm > 0)),
          random(job.seed, tensor),
          row_stride(job.row_stride) {}
    T* load(int64_t row, int64_t offset, int64_t n, T* tile) const {
        const int64_t column = first_column + offset;
        if (in_place) return static_cast<T*>(view.data) + element_offset(view, row, column);
        if (is_expanded) {
            expand(row * slot_size + column, n, tile);
        } else {
            load_tile(view, row, column, n, tile);
        }
        return tile;
    }
    void store(int64_t row, int64_t offset, int64_t n, const T* tile) const {
        if (in_place) return;
        const int64_t column = first_column + offset;
        if (is_expanded) return compress(row * slot_size + column, n, tile);
        if (stochastic_rounding) return store_at_random(row, column, n, tile);
        store_tile(view, row, column, n, tile);
    }
    __attribute__((noinline)) void store_at_random(int64_t row, int64_t column, int64_t n,
                                                   const T* tile) const {
        if (packed.words) return store_kept_at_random(column, n, tile);
        for (int64_t done = 0, run = 0; done < n; done += run) {  // a row of the tensor at a time
            const int64_t here = row * slot_size + column + done;
            const int64_t rest = row_stride.length - here % row_stride.length;
            run = rest < n - done ? rest : n - done;
            store_tile(view, row, column + done, run, tile + done, random,
                       row_stride.element(here));
        }
    }
    // The state of kept elements from one rank on; its random bits are those of the elements.
    void store_kept_at_random(int64_t rank, int64_t n, const T* tile) const {
        with_dtype(view, [&](auto* data) {
            using Stored = std::remove_pointer_t<decltype(data)>;
            MaskCursor at = MaskCursor::at(packed, rank);
            for (int64_t i = 0; i < n; ++i, at.bits &= at.bits - 1) {
                while (!at.bits) at.bits = packed.words[++at.word];
                const int64_t element = at.word * 64 + __builtin_ctzll(at.bits);
                data[(rank + i) * view.element_stride] =
                    Convert<Stored, T>::store(tile[i], random(element));
            }
        });
    }
    __attribute__((noinline)) void expand(int64_t element, int64_t n, T* tile) const {
        std::memset(tile, 0, size_t(n) * sizeof(T));
        with_dtype(view, [&](auto* data) {
            using Stored = std::remove_pointer_t<decltype(data)>;
            for_each_kept(packed, element, n, [&](int64_t j, int64_t rank) {
                tile[j] = Convert<Stored, T>::load(data[rank * view.slot_stride]);
            });
        });
    }
    __attribute__((noinline)) void compress(int64_t element, int64_t n, const T* tile) const {
        with_dtype(view, [&](auto* data) {
            using Stored = std::remove_pointer_t<decltype(data)>;
            for_each_kept(packed, element, n, [&](int64_t j, int64_t rank) {
                data[rank * view.slot_stride] =
                    stochastic_rounding ? Convert<Stored, T>::store(tile[j], random(element + j))
                                        : Convert<Stored, T>::store(tile[j]);
            });
        });
    }
    SPARSESTEP_INLINE void prefetch(int64_t row) const {
        if (is_expanded) return;
        const int64_t size = bytes_of(view.dtype);
        const char* at =
            static_cast<const char*>(view.data) + element_offset(view, row, first_column) * size;
        const int64_t bytes = (last_column - first_column) * view.element_stride * size;
        const int64_t end = bytes < prefetch_bytes ? bytes : prefetch_bytes;
        for (int64_t byte = 0; byte < end; byte += cache_line) {
            __builtin_prefetch(at + byte, 0, 2);
        }
    }
};

}  // namespace
}  // namespace sparsestep
