// The rows of a tensor as a rule sees them: as they lie in memory, or converted tile by tile.
//
// Included by kernels.cpp alone; everything has internal linkage (see types.h for the reason).
#pragma once

#include "core/compiler.h"
#include "core/types.h"
#include "kernels/tile.h"

namespace sparsestep {
namespace {

constexpr int64_t cache_line = 64;

// The hardware itself goes on with a row that is longer than this.
constexpr int64_t prefetch_bytes = 1024;

// The rows of one tensor, columns [first_column, last_column), as tiles of T. Which of the two
// kinds it is decides once per piece, not once per row, whether there is anything to convert.
// Where the number of columns is a usual one, it is known to the compiler (`fixed`, else 0): at
// such row lengths the bookkeeping of a loop shows.
template <class T, int64_t fixed>
struct StoredRows {
    static constexpr int64_t fixed_columns = fixed;
    static constexpr int64_t kept_columns = tile_size;

    char* data;
    int64_t row_bytes;
    int64_t lines;

    StoredRows(const View& view, const Job&, const Piece& piece, int)
        : data(static_cast<char*>(view.data) + piece.first_column * int64_t(sizeof(T))),
          row_bytes(view.slot_stride * int64_t(sizeof(T))) {
        const int64_t bytes = (piece.last_column - piece.first_column) * int64_t(sizeof(T));
        lines = ((bytes < prefetch_bytes ? bytes : prefetch_bytes) + cache_line - 1) / cache_line;
    }
    T* load(int64_t row, int64_t offset, int64_t, T*) const {
        return reinterpret_cast<T*>(data + row * row_bytes) + offset;
    }
    void store(int64_t, int64_t, int64_t, const T*) const {}
    void finish(int64_t, int64_t, const T*) const {}

    // Rows are fetched into the second-level cache. The first has room for far fewer requests under
    // way, and asking for ownership at once (a prefetch for writing) would go there too.
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
    static constexpr int64_t fixed_columns = 0;
    static constexpr int64_t kept_columns = tile_size;
    View view;
    int64_t first_column, last_column, block;
    bool stochastic;
    Randomness random;
    DealtRows dealt;

    ConvertedRows(const View& view, const Job& job, const Piece& piece, int tensor)
        : view(view),
          first_column(piece.first_column),
          last_column(piece.last_column),
          block(job.block),
          stochastic(job.stochastic),
          random(job.seed, tensor),
          dealt(job.dealt) {}
    T* load(int64_t row, int64_t offset, int64_t n, T* tile) const {
        load_tile(view, row, first_column + offset, n, tile);
        return tile;
    }
    void store(int64_t row, int64_t offset, int64_t n, const T* tile) const {
        const int64_t column = first_column + offset;
        if (!stochastic) return store_tile(view, row, column, n, tile);
        for (int64_t done = 0, run = 0; done < n; done += run) {  // a row of the tensor at a time
            const int64_t here = row * block + column + done;
            const int64_t rest = dealt.length - here % dealt.length;
            run = rest < n - done ? rest : n - done;
            store_tile(view, row, column + done, run, tile + done, random, dealt.element(here));
        }
    }
    void finish(int64_t, int64_t, const T*) const {}
    SPARSESTEP_INLINE void prefetch(int64_t row) const {
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
