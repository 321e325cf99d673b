// The lookup of embeddings: rows of a table, copied or pooled by bags.
//
// Ids are copied first, and only the copy is checked and used, so that concurrent writes have no
// effect. A bag is summed from its first id to its last, in at least float32, so its bits do not
// depend on threads or instruction sets.
//
// Compiled once per instruction set: CMake sets SPARSESTEP_ISA and the flags. Everything has
// internal linkage (see types.h for the reason).
#include <cstring>

#include "kernels/kernels.h"
#include "kernels/rows.h"

namespace sparsestep {
namespace {

// Prefetch distance in rows, into the L2 cache: L1 has room for far fewer outstanding requests.
// FBGEMM's choice, 16 rows ahead into L1, takes 1.5 times as long.
constexpr int64_t rows_ahead = 32;

template <class Body>
SPARSESTEP_INLINE auto with_integers(const Integers& integers, Body body) {
    return integers.is_short ? body(static_cast<const int32_t*>(integers.data))
                             : body(static_cast<const int64_t*>(integers.data));
}

// Start of a bag; for `bag` equal to the number of bags, the end of the last.
SPARSESTEP_INLINE int64_t start_of(const LookupWork& work, int64_t bag) {
    if (!work.starts.data) return bag * work.length;
    if (bag >= work.start_count) return work.id_count;
    return with_integers(work.starts, [&](auto* starts) { return int64_t(starts[bag]); });
}

// False if an id is out of range.
inline bool copy_ids(const LookupWork& work, int64_t begin, int64_t end) {
    return with_integers(work.ids, [&](auto* ids) {
        const uint64_t last = uint64_t(work.rows) - 1;
        int64_t* const to = work.indices;
        uint64_t bad = 0;  // sign bit: of a negative id, or of last - id
        for (int64_t i = begin; i < end; ++i) {
            const uint64_t id = uint64_t(int64_t(ids[i]));
            bad |= id | (last - id);
            to[i] = int64_t(id);
        }
        return int64_t(bad) >= 0;
    });
}

// Reductions of a bag: sum, weighted sum or maximum. A fused sum adds products before rounding.
enum class Reduction { sum, weighted, fused, max };

// Elements of a row that are summed in registers.
constexpr size_t vector_bytes = 32;
template <class T>
constexpr int64_t lanes = int64_t(vector_bytes / sizeof(T));
template <class T>
struct Vector {
    typedef T Type __attribute__((vector_size(vector_bytes)));
};

SPARSESTEP_INLINE void prefetch_row(const void* row, int64_t bytes) {
    const int64_t end = bytes < prefetch_bytes ? bytes : prefetch_bytes;
#pragma GCC unroll 4
    for (int64_t byte = 0; byte < end; byte += cache_line) {
        __builtin_prefetch(static_cast<const char*>(row) + byte, 0, 2);
    }
}

// Bags of one table. If rows consist of chunks of a number of vectors, that is `vectors`; else 0.
template <class Stored, class T, Reduction reduction, int vectors>
class Pool {
public:
    explicit Pool(const LookupWork& work)
        : job_(work),
          table_(static_cast<const Stored*>(work.table)),
          columns_(work.columns),
          stride_(work.row_stride),
          padding_(work.padding) {}

    // The ids [begin, end) of one bag. Rows of ids up to `known` may be prefetched.
    SPARSESTEP_INLINE void run(int64_t bag, int64_t begin, int64_t end, int64_t known) {
        bag_ = bag;
        begin_ = begin;
        end_ = end;
        known_ = known;
        counted_ = end - begin;
        if (padding_ >= 0) counted_ = count(job_.indices, begin, end, padding_);
        int64_t column = 0;
        if constexpr (vectors > 0) {
            column = run_vectors<vectors>(column);
        } else if constexpr (is_in_registers) {
            column = run_vectors<8>(column);
            if (column < columns_) column = run_vectors<4>(column);
            if (column < columns_) column = run_vectors<2>(column);
            if constexpr (!is_bfloat16) {
                if (column < columns_) column = run_vectors<1>(column);
            }
        }
        if constexpr (vectors == 0) {
            while (column < columns_) column = run_tile(column);
        }
        if (job_.counted) job_.counted[bag] = counted_;
    }

    SPARSESTEP_INLINE void prefetch(int64_t row) const {
        prefetch_row(table_ + row * stride_, columns_ * int64_t(sizeof(Stored)));
    }

    static constexpr bool is_bfloat16 = std::is_same_v<Stored, Bfloat16>;
    static constexpr bool is_in_registers =
        (std::is_same_v<Stored, T> || is_bfloat16) && reduction != Reduction::max;

private:
    using Number = Convert<Stored, T>;
    using V = typename Vector<T>::Type;
    using Words = typename Vector<uint32_t>::Type;  // as many as T if that is float

    // Not inlined: the compiler would unroll it, for bags without padding, too.
    static __attribute__((noinline)) int64_t count(const int64_t* indices, int64_t begin,
                                                   int64_t end, int64_t padding) {
        int64_t counted = 0;
        for (int64_t i = begin; i < end; ++i) counted += indices[i] != padding;
        return counted;
    }

    // Calls add(row, id, entry) for the ids of the bag without padding; prefetches these columns.
    template <class Add>
    SPARSESTEP_INLINE void for_each_row(int64_t column, int64_t columns, Add add) const {
        const int64_t* const indices = job_.indices;
        const Stored* const table = table_ + column;
        const int64_t stride = stride_, padding = padding_, end = end_, known = known_;
        const int64_t bytes = columns * int64_t(sizeof(Stored));
        const bool prefetches = column * int64_t(sizeof(Stored)) < prefetch_bytes;
        const int64_t last = prefetches ? known - rows_ahead : 0;
        for (int64_t i = begin_; i < end; ++i) {
            const int64_t id = indices[i];
            if (id != padding) add(table + id * stride, id, i);
            if (i < last) prefetch_row(table + indices[i + rows_ahead] * stride, bytes);
        }
    }

    // Reduces columns from `column` on, that many vectors at a time; returns the first column left.
    template <int count>
    SPARSESTEP_INLINE int64_t run_vectors(int64_t column) {
        constexpr int64_t width = count * lanes<T>;
        for (; column + width <= columns_; column += width) {
            V total[count] = {};
            const auto add = [&](const Stored* row, int64_t, int64_t entry) SPARSESTEP_LAMBDA {
                const T factor = factor_of(entry);
                V values[count];
                load_vectors<count>(row, values);
#pragma GCC unroll 8
                for (int v = 0; v < count; ++v) {
                    if constexpr (reduction == Reduction::sum) {
                        total[v] += values[v];
                    } else if constexpr (reduction == Reduction::weighted) {
                        total[v] += values[v] * factor;
                    } else {
                        for (int64_t l = 0; l < lanes<T>; ++l) {
                            total[v][l] = fused(values[v][l], factor, total[v][l]);
                        }
                    }
                }
            };
            for_each_row(column, width, add);
            store_vectors<count>(column, total);
        }
        return column;
    }

    // The same for a tile of any length.
    int64_t run_tile(int64_t column) {
        const int64_t rest = columns_ - column, n = rest < tile_size ? rest : tile_size;
        alignas(cache_line) T total[tile_size];
        std::memset(total, 0, size_t(n) * sizeof(T));
        alignas(cache_line) int64_t winner[reduction == Reduction::max ? tile_size : 1];
        bool is_first = true;
        for_each_row(column, n, [&](const Stored* row, int64_t id, int64_t entry) {
            add(row, factor_of(entry), id, n, is_first, total, winner);
            is_first = false;
        });
        store(column, n, total, winner);
        return column + n;
    }

    SPARSESTEP_INLINE T factor_of(int64_t entry) const {
        if constexpr (reduction == Reduction::weighted || reduction == Reduction::fused) {
            return Number::load(static_cast<const Stored*>(job_.factors)[entry]);
        }
        return T(1);
    }

    static void add(const Stored* __restrict row, T factor, int64_t id, int64_t n, bool is_first,
                    T* __restrict total, int64_t* __restrict winner) {
        for (int64_t c = 0; c < n; ++c) {
            const T value = Number::load(row[c]);
            if constexpr (reduction == Reduction::sum) {
                total[c] += value;
            } else if constexpr (reduction == Reduction::weighted) {
                total[c] += value * factor;
            } else if constexpr (reduction == Reduction::fused) {
                total[c] = fused(value, factor, total[c]);
            } else {
                const bool better = is_first || value > total[c];
                total[c] = better ? value : total[c];
                winner[c] = better ? id : winner[c];
            }
        }
    }

    // Of bfloat16, vector 2n gets the even elements of a pair of vectors, and 2n + 1 the odd ones:
    // both are in place within the words of memory.
    template <int count>
    static SPARSESTEP_INLINE void load_vectors(const Stored* from, V (&to)[count]) {
        if constexpr (is_bfloat16) {
#pragma GCC unroll 8
            for (int v = 0; v < count; v += 2) {
                Words words;
                std::memcpy(&words, from + v * lanes<T>, sizeof(words));
                const Words even = words << 16, odd = words & 0xffff0000u;
                std::memcpy(&to[v], &even, sizeof(even));
                std::memcpy(&to[v + 1], &odd, sizeof(odd));
            }
        } else {
#pragma GCC unroll 8
            for (int v = 0; v < count; ++v) std::memcpy(&to[v], from + v * lanes<T>, sizeof(V));
        }
    }

    // As `store` does, but from registers: to read the stack in wider vectors than it was written,
    // the processor would wait for all earlier stores.
    template <int count>
    SPARSESTEP_INLINE void store_vectors(int64_t column, V (&total)[count]) const {
        Stored* const to = static_cast<Stored*>(job_.output) + bag_ * columns_ + column;
        const bool is_mean = job_.pooling == Pooling::mean && counted_ > 0;
        if constexpr (is_bfloat16) {
            const bool by_fbgemm = padding_ < 0;
            const T size = Number::load(Number::store(T(counted_)));
#pragma GCC unroll 8
            for (int v = 0; v < count; v += 2) {
                Words even, odd;
                round_vector(total[v], by_fbgemm, is_mean, size, even);
                round_vector(total[v + 1], by_fbgemm, is_mean, size, odd);
                const Words words = even >> 16 | odd;
                std::memcpy(to + v * lanes<T>, &words, sizeof(words));
            }
        } else {
            if (is_mean) {
#pragma GCC unroll 8
                for (int v = 0; v < count; ++v) total[v] /= T(counted_);
            }
#pragma GCC unroll 8
            for (int v = 0; v < count; ++v) std::memcpy(to + v * lanes<T>, &total[v], sizeof(V));
        }
    }

    // Sums or means as bfloat16, in the upper halves of words.
    static SPARSESTEP_INLINE void round_vector(const V& sums, bool by_fbgemm, bool is_mean, T size,
                                               Words& to) {
        round_vector(sums, by_fbgemm, to);
        if (is_mean) {
            V values;
            std::memcpy(&values, &to, sizeof(values));
            round_vector(values / size, false, to);
        }
    }
    // As `rounded`, or as Bfloat16::nearest.
    static SPARSESTEP_INLINE void round_vector(const V& values, bool by_fbgemm, Words& to) {
        Words words, is_nan;
        const auto differs = values != values;
        std::memcpy(&words, &values, sizeof(words));
        std::memcpy(&is_nan, &differs, sizeof(is_nan));
        words += by_fbgemm ? (words & 0u) + 0x8000u : 0x7fffu + ((words >> 16) & 1u);
        to = ((words & 0xffff0000u) & ~is_nan) | (0x7fc00000u & is_nan);
    }

    SPARSESTEP_INLINE void store(int64_t column, int64_t n, const T* total,
                                 const int64_t* winner) const {
        Stored* const to = static_cast<Stored*>(job_.output) + bag_ * columns_ + column;
        const bool by_fbgemm = padding_ < 0;
        for (int64_t c = 0; c < n; ++c) {
            to[c] = by_fbgemm ? rounded(total[c]) : Number::store(total[c]);
        }
        if (job_.pooling == Pooling::mean && counted_ > 0) {
            const T count = Number::load(Number::store(T(counted_)));
            for (int64_t c = 0; c < n; ++c) to[c] = Number::store(Number::load(to[c]) / count);
        }
        if constexpr (reduction == Reduction::max) {
            if (!job_.winners) return;
            int64_t* const whose = job_.winners + bag_ * columns_ + column;
            for (int64_t c = 0; c < n; ++c) whose[c] = counted_ ? winner[c] : 0;
        }
    }

    static float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
    static double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }

    // Torch's sums without padding come from FBGEMM. It rounds ties of bfloat16 upwards.
    static Stored rounded(T total) {
        if constexpr (std::is_same_v<Stored, Bfloat16>) {
            const uint32_t word = bits_as<uint32_t>(total) + 0x8000u;
            return {uint16_t(total != total ? 0x7fc0u : word >> 16)};
        } else {
            return Number::store(total);
        }
    }

    const LookupWork& job_;
    const Stored* const table_;
    const int64_t columns_, stride_, padding_;
    int64_t bag_, begin_, end_, known_, counted_;  // of the current bag
};

// Rows of any dtype, copied as bytes.
class Copy {
public:
    explicit Copy(const LookupWork& work)
        : job_(work),
          bytes_(work.columns * bytes_of(work.dtype)),
          stride_(work.row_stride * bytes_of(work.dtype)) {}

    void run(int64_t bag, int64_t begin, int64_t, int64_t known) {
        if (begin + rows_ahead < known) prefetch(job_.indices[begin + rows_ahead]);
        const char* const row =
            static_cast<const char*>(job_.table) + job_.indices[begin] * stride_;
        std::memcpy(static_cast<char*>(job_.output) + bag * bytes_, row, size_t(bytes_));
    }
    SPARSESTEP_INLINE void prefetch(int64_t row) const {
        prefetch_row(static_cast<const char*>(job_.table) + row * stride_, bytes_);
    }

private:
    const LookupWork& job_;
    const int64_t bytes_, stride_;
};

// Dot products of rows and the query of their bag. Products are added up in lanes, and the lanes in
// pairs, in one order for every instruction set.
template <class Stored, class T>
class Dot {
public:
    explicit Dot(const LookupWork& work)
        : job_(work),
          table_(static_cast<const Stored*>(work.table)),
          queries_(static_cast<const Stored*>(work.queries)),
          columns_(work.columns) {}

    SPARSESTEP_INLINE void run(int64_t bag, int64_t begin, int64_t end, int64_t known) const {
        const Stored* const query = queries_ + bag * columns_;
        for (int64_t i = begin; i < end; ++i) {
            if (i + rows_ahead < known) prefetch(job_.indices[i + rows_ahead]);
            const T found = product(table_ + job_.indices[i] * job_.row_stride, query);
            static_cast<Stored*>(job_.output)[i] = Convert<Stored, T>::store(found);
        }
    }
    SPARSESTEP_INLINE void prefetch(int64_t row) const {
        prefetch_row(table_ + row * job_.row_stride, columns_ * int64_t(sizeof(Stored)));
    }

private:
    static constexpr int64_t width = 4 * lanes<T>;

    T product(const Stored* __restrict row, const Stored* __restrict query) const {
        alignas(cache_line) T sums[width] = {};
        int64_t column = 0;
        for (; column + width <= columns_; column += width) {
            for (int64_t l = 0; l < width; ++l) {
                sums[l] += Convert<Stored, T>::load(row[column + l]) *
                           Convert<Stored, T>::load(query[column + l]);
            }
        }
        for (int64_t l = 0; column + l < columns_; ++l) {
            sums[l] += Convert<Stored, T>::load(row[column + l]) *
                       Convert<Stored, T>::load(query[column + l]);
        }
        for (int64_t half = width / 2; half > 0; half /= 2) {
            for (int64_t l = 0; l < half; ++l) sums[l] += sums[l + half];
        }
        return sums[0];
    }

    const LookupWork& job_;
    const Stored* const table_;
    const Stored* const queries_;
    const int64_t columns_;
};

// Moves ids that are not padding to the front, with their bags; returns their number.
inline int64_t keep_counted(const LookupWork& work, int64_t begin, int64_t end) {
    int64_t at = begin;
    for (int64_t i = begin; i < end; ++i) {
        const int64_t id = work.indices[i];
        if (work.value_index) work.value_index[at] = work.value_index[i];
        work.indices[at] = id;
        at += id != work.padding;
    }
    return at - begin;
}

// The bags [first, last), whose ids are [begin, end), copied and checked.
template <class Each>
__attribute__((noinline)) bool run_bags(const LookupWork& work, Each each, int64_t first,
                                        int64_t last, int64_t begin, int64_t end) {
    const int64_t known = end;
    for (int64_t i = begin; i < end && i < begin + rows_ahead; ++i) {
        each.prefetch(work.indices[i]);
    }
    for (int64_t bag = first; bag < last; ++bag) {
        const int64_t bag_end = bag + 1 < last ? start_of(work, bag + 1) : end;
        if (bag_end < begin || bag_end > end) return false;
        each.run(bag, begin, bag_end, known);
        if (work.value_index) {
            for (int64_t i = begin; i < bag_end; ++i) work.value_index[i] = bag;
        }
        begin = bag_end;
    }
    return true;
}

template <class Stored, class T, Reduction reduction>
bool pool(const LookupWork& work, int64_t first, int64_t last, int64_t begin, int64_t end) {
    const auto run = [&](auto vectors) {
        using Each = Pool<Stored, T, reduction, vectors()>;
        return run_bags(work, Each(work), first, last, begin, end);
    };
    if constexpr (Pool<Stored, T, reduction, 0>::is_in_registers) {
        if (work.columns % (8 * lanes<T>) == 0) return run(std::integral_constant<int, 8>());
        if (work.columns == 4 * lanes<T>) return run(std::integral_constant<int, 4>());
        if (work.columns == 2 * lanes<T>) return run(std::integral_constant<int, 2>());
    }
    return run(std::integral_constant<int, 0>());
}

// See LookupWork.
LookedUp look_up_bags(const LookupWork& work, int64_t first, int64_t last) {
    constexpr LookedUp bad{0, -1};
    const int64_t begin = start_of(work, first), end = start_of(work, last);
    if (begin < 0 || begin > end || end > work.id_count) return bad;
    if ((first == 0 && begin != 0) || (last == work.bags && end != work.id_count)) return bad;
    if (!copy_ids(work, begin, end)) return bad;
    bool good = true;
    if (work.pooling == Pooling::none) {
        good = run_bags(work, Copy(work), first, last, begin, end);
    } else {
        with_dtype(TensorView{const_cast<void*>(work.table), work.dtype, 0, 0}, [&](auto* table) {
            using Stored = std::remove_pointer_t<decltype(table)>;
            using T = std::conditional_t<sizeof(Stored) == 8, double, float>;
            // FBGEMM, which torch uses for sums without padding, fuses float32 sums.
            constexpr bool is_float = std::is_same_v<Stored, float>;
            constexpr auto fused = is_float ? Reduction::fused : Reduction::weighted;
            if (work.pooling == Pooling::dot) {
                good = run_bags(work, Dot<Stored, T>(work), first, last, begin, end);
                return;
            }
            const auto run = work.pooling == Pooling::max ? &pool<Stored, T, Reduction::max>
                             : !work.factors              ? &pool<Stored, T, Reduction::sum>
                             : work.padding < 0           ? &pool<Stored, T, fused>
                                                          : &pool<Stored, T, Reduction::weighted>;
            good = run(work, first, last, begin, end);
        });
    }
    if (!good) return bad;
    return {begin, work.padding < 0 ? end - begin : keep_counted(work, begin, end)};
}

}  // namespace

Lookup SPARSESTEP_JOIN(lookup_, SPARSESTEP_ISA)() { return &look_up_bags; }

}  // namespace sparsestep
