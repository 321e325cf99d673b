// Rows of n-grams, for batches of several pieces, against one n-gram at a time.
#include <string>
#include <vector>

#include "core/ngrams.h"
#include "testing.h"

namespace sparsestep::testing {
namespace {

void test_batch(int64_t batch, int64_t time, bool is_split, int threads) {
    const std::string what = std::to_string(batch) + " x " + std::to_string(time) + " tokens, " +
                             std::to_string(threads) + " threads";
    const std::vector<int64_t> tokens = random_indices(batch * time, 9, 1);
    std::vector<int64_t> documents = random_indices(batch * time, 20, 2);
    int64_t document = 0;  // which changes rarely, and not where a sequence begins
    for (int64_t& each : documents) each = document += each == 0;
    Ngrams ngrams{};
    ngrams.tokens = {tokens.data(), false};
    ngrams.documents = {documents.data(), false};
    ngrams.positions = batch * time;
    ngrams.time = time;
    ngrams.orders = {3, 1, 5};
    ngrams.heads = 2;
    ngrams.seed = 7;
    ngrams.rows = 1000;
    ngrams.is_split = is_split;
    std::vector<int64_t> rows(size_t(ngrams.positions * ngrams.per_position()), -1);
    std::vector<int64_t> starts(size_t(ngrams.bags()) + 1, -1);
    const int64_t count = hash_ngrams(ngrams, rows.data(), starts.data(), threads);
    int64_t at = 0;
    size_t bag = 0;
    bool right = true;
    for (int64_t p = 0; p < ngrams.positions; ++p) {
        if (!is_split) right &= starts[bag++] == at;
        for (const int64_t order : ngrams.orders) {
            bool fits = p % time + 1 >= order;
            for (int64_t i = p - order + 2; fits && i <= p; ++i) {
                fits = documents[size_t(i)] == documents[size_t(i) - 1];
            }
            for (uint64_t head = 0; head < 2; ++head) {
                if (is_split) right &= starts[bag++] == at;
                if (!fits) continue;
                uint64_t hash = splitmix(splitmix(splitmix(7) ^ uint64_t(order)) ^ head);
                for (int64_t i = p - order + 1; i <= p; ++i) {
                    hash = splitmix((hash ^ uint64_t(tokens[size_t(i)])) + 0x9e3779b97f4a7c15u);
                }
                right &= rows[size_t(at++)] == int64_t((hash >> 1) % 1000);
            }
        }
    }
    check(right && count == at && starts.back() == at, what);
}

}  // namespace

void test_ngrams() {
    for (const int threads : {1, 3}) {
        test_batch(1, 1, false, threads);
        test_batch(3, 2047, true, threads);
        test_batch(4000, 2, false, threads);
        test_batch(900, 9, false, threads);
        test_batch(1, 6000, false, threads);
    }
}

}  // namespace sparsestep::testing
