// Rows of a table in a file: the pages that hold them, and requests to the operating system for
// these pages. A map with one byte per page records earlier requests.
#pragma once

#if !defined(_WIN32)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <vector>

#include "core/threads.h"

#if defined(__linux__)
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace sparsestep {

// Row r lies at [offset + r * row_bytes, offset + (r + 1) * row_bytes) of the file.
struct FileRows {
    const int64_t* rows;
    int64_t entries;
    int64_t count;                          // rows that there are; others are left alone
    int64_t row_bytes, offset, page_bytes;  // that of pages is a power of two
};

struct PageRun {
    int64_t first, pages;
};

// Calls visit(page) for the pages of entries [first, last) that the map does not know.
template <class Visit>
void each_unknown_page(const FileRows& of, const uint8_t* known, int64_t first, int64_t last,
                       const Visit& visit) {
    constexpr int64_t ahead = 32;  // the map of a large table is in no cache
    const int shift = __builtin_ctzll(uint64_t(of.page_bytes));
    for (int64_t e = first; e < last; ++e) {
        const int64_t next = of.rows[std::min(e + ahead, last - 1)];
        if (uint64_t(next) < uint64_t(of.count)) {
            __builtin_prefetch(known + ((of.offset + next * of.row_bytes) >> shift));
        }
        const int64_t row = of.rows[e];
        if (uint64_t(row) >= uint64_t(of.count)) continue;
        const int64_t begin = of.offset + row * of.row_bytes;
        const int64_t end = (begin + of.row_bytes - 1) >> shift;
        for (int64_t page = begin >> shift; page <= end; ++page) {
            if (!known[page]) visit(page);
        }
    }
}

// Whether the map knows the pages of all rows, as it does in most steps.
inline bool knows_all(const FileRows& of, const uint8_t* known, int threads) {
    constexpr int64_t piece = 1 << 11;
    std::atomic<bool> all{true};
    parallel(threads, (of.entries + piece - 1) / piece, [&](int64_t task) {
        const int64_t last = std::min((task + 1) * piece, of.entries);
        each_unknown_page(of, known, task * piece, last, [&](int64_t) { all = false; });
    });
    return all;
}

// Runs of adjacent pages with these rows that the map does not know, in order.
inline std::vector<PageRun> unknown_pages(const FileRows& of, const uint8_t* known) {
    std::vector<int64_t> found;
    each_unknown_page(of, known, 0, of.entries, [&](int64_t page) { found.push_back(page); });
    std::sort(found.begin(), found.end());
    std::vector<PageRun> runs;
    for (int64_t page : found) {
        const int64_t end = runs.empty() ? -1 : runs.back().first + runs.back().pages;
        if (page == end) ++runs.back().pages;
        if (page > end) runs.push_back({page, 1});
    }
    return runs;
}

inline int64_t pages_of(const FileRows& of) {
    return (of.offset + of.count * of.row_bytes + of.page_bytes - 1) / of.page_bytes;
}

// The first page from this one on that has no blocks. A table that was filled once has them all,
// and reserving page by page would take longer than writing. A file system that does not know about
// holes reports none: then only the number of blocks counts.
inline int64_t next_hole(int file, int64_t page, int64_t page_bytes) {
#if defined(__linux__)
    const int64_t begin = page * page_bytes, hole = lseek(file, begin, SEEK_HOLE);
    struct stat about;
    if (hole <= begin || fstat(file, &about)) return page;
    const bool knows_holes = lseek(file, 0, SEEK_HOLE) < about.st_size;
    if (!knows_holes && about.st_blocks * 512 < about.st_size) return page;
    return hole / page_bytes;
#else
    (void)file, (void)page_bytes;
    return page;
#endif
}

// Reserves blocks for bytes of a file. An errno, or 0; EOPNOTSUPP if the file system cannot.
inline int allocate_blocks(int file, int64_t begin, int64_t size) {
    int error = 0;
#if defined(__linux__)
    do {
        error = fallocate(file, FALLOC_FL_KEEP_SIZE, begin, size) ? errno : 0;
    } while (error == EINTR);
#else
    (void)file, (void)begin, (void)size;
#endif
    return error == ENOSYS || error == EINVAL ? EOPNOTSUPP : error;
}

// Has blocks held ready for rows that are about to be written, so that the disk cannot turn out to
// be full while they are. An errno, or 0.
inline int reserve_rows(const FileRows& of, int file, uint8_t* known, int threads) {
    if (knows_all(of, known, threads)) return 0;
    const int64_t page_count = pages_of(of);
    const std::vector<PageRun> runs = unknown_pages(of, known);
    if (runs.empty()) return 0;  // by now
    // A file system that cannot reserve blocks may report holes wrongly, too.
    if (const int error = allocate_blocks(file, runs[0].first * of.page_bytes, of.page_bytes))
        return error;
    for (PageRun run : runs) {
        const int64_t end = run.first + run.pages;
        while (run.first < end) {
            if (known[run.first]) {  // by now
                ++run.first;
                continue;
            }
            int64_t pages = std::min(page_count, next_hole(file, run.first, of.page_bytes));
            pages -= run.first;
            if (pages <= 0) {
                pages = end - run.first;
                const int error =
                    allocate_blocks(file, run.first * of.page_bytes, pages * of.page_bytes);
                if (error) return error;
            }
            std::fill_n(known + run.first, pages, uint8_t(1));
            run.first += pages;
        }
    }
    return 0;
}

// Has the operating system begin to read the pages of rows. How many were asked for.
inline int64_t prefetch_rows(const FileRows& of, char* memory, uint8_t* known) {
    int64_t asked = 0;
    for (const PageRun& run : unknown_pages(of, known)) {
#if defined(_WIN32)
        (void)memory;  // pages come when they are touched
#else
        madvise(memory + run.first * of.page_bytes, size_t(run.pages * of.page_bytes),
                MADV_WILLNEED);
#endif
        std::fill_n(known + run.first, run.pages, uint8_t(1));
        asked += run.pages;
    }
    return asked;
}

// Notes which rows are about to be written.
inline void mark_rows(const int64_t* rows, int64_t entries, int64_t count, uint8_t* marks) {
    for (int64_t e = 0; e < entries; ++e) {
        if (uint64_t(rows[e]) < uint64_t(count)) marks[rows[e]] = 1;
    }
}

}  // namespace sparsestep
