// Rows of a table in a file: which pages they are, and that each is asked for once.
#include <cstdio>
#include <set>
#include <string>

#include "core/mapped_file.h"
#include "testing.h"

#if defined(_WIN32)
#include <io.h>
#define fileno _fileno
#define ftruncate _chsize_s
#else
#include <unistd.h>
#endif

namespace sparsestep::testing {
namespace {

void test_pages(int64_t row_bytes, int64_t offset, unsigned seed) {
    const std::string what = std::to_string(row_bytes) + " bytes a row";
    const int64_t count = 500, page = 4096;
    std::vector<int64_t> rows = random_indices(200, count, seed);
    rows.push_back(count - 1);
    std::set<int64_t> wanted;
    for (int64_t row : rows) {
        for (int64_t at = 0; at < row_bytes; ++at) {
            wanted.insert((offset + row * row_bytes + at) / page);
        }
    }
    for (int64_t outside : {int64_t(-1), count, INT64_MAX, INT64_MIN}) rows.push_back(outside);
    const FileRows of{rows.data(), int64_t(rows.size()), count, row_bytes, offset, page};
    std::vector<uint8_t> known(size_t((offset + count * row_bytes + page - 1) / page), 0);
    std::set<int64_t> found;
    int64_t end = -1, total = 0;
    bool in_order = true;
    for (const PageRun& run : unknown_pages(of, known.data())) {
        in_order &= run.first > end;  // neighbours are together
        end = run.first + run.pages;
        for (int64_t i = run.first; i < end; ++i) found.insert(i);
        total += run.pages;
    }
    check(in_order && found == wanted && total == int64_t(wanted.size()), "pages: " + what);

    std::FILE* const file = std::tmpfile();
    check(file && reserve_rows(of, fileno(file), known.data(), 2) == 0, "reserved: " + what);
    if (file) std::fclose(file);
    bool all = true;
    for (size_t i = 0; i < known.size(); ++i) all &= known[i] == (wanted.count(int64_t(i)) > 0);
    check(all && unknown_pages(of, known.data()).empty(), "once: " + what);
    check(prefetch_rows(of, nullptr, known.data()) == 0, "nothing is left to ask for: " + what);
}

// What has blocks already is known at once, up to the next hole.
void test_blocks() {
    const int64_t page = 4096, count = 40, row = 2;
    const FileRows of{&row, 1, count, page, 0, page};
    std::vector<uint8_t> known(size_t(count), 0);
    std::FILE* const file = std::tmpfile();
    const std::vector<char> data(size_t(10 * page), 'x');
    const bool made = file && std::fwrite(data.data(), 1, data.size(), file) == data.size() &&
                      std::fflush(file) == 0 && ftruncate(fileno(file), count * page) == 0;
    check(made && reserve_rows(of, fileno(file), known.data(), 2) == 0, "reserved: blocks");
    if (file) std::fclose(file);
#if defined(__linux__)
    bool right = true;
    for (int64_t i = 0; i < count; ++i) right &= known[size_t(i)] == (i >= row && i < 10);
    check(right, "all that has blocks is known");
#endif
}

void test_marks() {
    const std::vector<int64_t> rows{3, 0, 3, -1, 5, INT64_MIN};
    std::vector<uint8_t> marks(5, 0);
    mark_rows(rows.data(), int64_t(rows.size()), int64_t(marks.size()), marks.data());
    check(marks == std::vector<uint8_t>({1, 0, 0, 1, 0}), "marks");
}

}  // namespace

void test_mapped_file() {
    test_pages(4, 4096, 1);
    test_pages(256, 4096, 2);
    test_pages(3000, 4096, 3);
    test_pages(9000, 512, 4);
    test_blocks();
    test_marks();
}

}  // namespace sparsestep::testing
