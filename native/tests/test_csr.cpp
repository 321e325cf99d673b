// The slots of compressed gradients, as one would write them down by hand.
#include <random>
#include <string>
#include <vector>

#include "core/csr.h"
#include "testing.h"

using namespace sparsestep;
using namespace sparsestep::testing;

namespace {

// Blocks at random, and what they are: the slots row by row, and the row of the values of each.
struct Blocks {
    int64_t groups, block_rows, row_slots;
    std::vector<int64_t> starts{0}, others, indices, value_index;

    Blocks(int64_t groups, int64_t block_rows, int64_t row_slots, double share, unsigned seed)
        : groups(groups), block_rows(block_rows), row_slots(row_slots) {
        std::mt19937 random(seed);
        std::uniform_real_distribution<double> uniform;
        for (int64_t g = 0; g < groups; ++g) {
            const auto first = others.size();
            for (int64_t w = 0; w < row_slots; ++w) {
                if (uniform(random) < share) others.push_back(w);
            }
            starts.push_back(int64_t(others.size()));
            for (int64_t row = 0; row < block_rows; ++row) {
                for (size_t e = first; e < others.size(); ++e) {
                    indices.push_back((g * block_rows + row) * row_slots + others[e]);
                    value_index.push_back(int64_t(e) * block_rows + row);
                }
            }
        }
    }

    CompressedSlots compressed() const {
        return {starts.data(),          others.data(), groups,
                int64_t(others.size()), block_rows,    row_slots};
    }
};

void test_against_plain_loops() {
    for (int64_t groups : {0, 1, 5, 400}) {
        for (int64_t block_rows : {1, 3}) {
            for (int64_t row_slots : {1, 6, 90}) {
                for (double share : {0.0, 0.3, 1.0}) {
                    const Blocks blocks(groups, block_rows, row_slots, share,
                                        unsigned(groups + row_slots));
                    for (int threads : {1, 2, 5}) {
                        std::vector<int64_t> indices(blocks.indices.size(), -1);
                        std::vector<int64_t> value_index(blocks.value_index.size(), -1);
                        int64_t* rows = block_rows > 1 ? value_index.data() : nullptr;
                        const std::string what = std::to_string(groups) + " groups of " +
                                                 std::to_string(block_rows) + " x " +
                                                 std::to_string(row_slots);
                        check(slots_of(blocks.compressed(), indices.data(), rows, threads), what);
                        check(indices == blocks.indices, what + ": slots");
                        check(!rows || value_index == blocks.value_index,
                              what + ": rows of values");
                    }
                }
            }
        }
    }
}

void test_what_is_not_valid() {
    const auto refused = [](const Blocks& blocks, const std::string& what) {
        // As many as there should be, so that a write past their end is seen.
        std::vector<int64_t> indices(blocks.others.size() * size_t(blocks.block_rows));
        std::vector<int64_t> value_index(indices.size());
        check(!slots_of(blocks.compressed(), indices.data(), value_index.data(), 2), what);
    };
    for (int64_t groups : {3, 900}) {
        const Blocks good(groups, 2, 20, 0.5, 1);
        Blocks blocks = good;
        for (int64_t bad : {int64_t(-1), int64_t(1), INT64_MIN, INT64_MAX}) {
            blocks.starts[0] = bad;
            refused(blocks, "the first start is not zero");
        }
        blocks = good;
        for (int64_t bad : {int64_t(-1), int64_t(1), INT64_MAX}) {
            blocks.starts.back() = bad;
            refused(blocks, "the last start is not the number of entries");
        }
        blocks = good;
        for (int64_t bad : {INT64_MIN, int64_t(-1), int64_t(blocks.others.size()) + 1, INT64_MAX}) {
            blocks.starts[1] = bad;
            refused(blocks, "starts that fall");
        }
        blocks = good;
        for (int64_t bad : {INT64_MIN, int64_t(-1), int64_t(20), INT64_MAX}) {
            blocks.others.back() = bad;
            refused(blocks, "a column that there is not");
        }
    }
}

}  // namespace

void sparsestep::testing::test_csr() {
    test_against_plain_loops();
    test_what_is_not_valid();
}
