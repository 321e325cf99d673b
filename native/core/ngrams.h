// The rows of a batch's n-grams: see src/sparsestep/nn/ngram.py, which has the hash in torch's
// operations.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "core/lookup.h"
#include "core/splitmix.h"
#include "core/threads.h"

namespace sparsestep {

inline int64_t at(const Integers& integers, int64_t index) {
    return integers.is_short ? static_cast<const int32_t*>(integers.data)[index]
                             : static_cast<const int64_t*>(integers.data)[index];
}

struct Ngrams {
    Integers tokens;     // [positions / time, time]
    Integers documents;  // the same; no data: a sequence is one document
    int64_t positions, time;
    std::vector<int64_t> orders;
    int64_t heads;
    uint64_t seed, rows;
    bool is_split;      // a bag for each order and head of a position, instead of one for all
    const char* table;  // rows are about to be looked up there; null: elsewhere
    int64_t row_bytes;  // from one row of the table to the next

    int64_t per_position() const { return int64_t(orders.size()) * heads; }
    int64_t bags() const { return positions * (is_split ? per_position() : 1); }

    // Calls visit(position, tokens of its document up to there). Such a run may be counted short,
    // but not below the longest order.
    template <class Visit>
    void each_run(int64_t first, int64_t last, const Visit& visit) const {
        const int64_t longest = *std::max_element(orders.begin(), orders.end());
        int64_t in_sequence = first % time, run = 0;
        const int64_t back = std::min(in_sequence, longest - 1);
        in_sequence -= back;
        for (int64_t p = first - back; p < last; ++p) {
            const bool begins =
                in_sequence == 0 || (documents.data && at(documents, p) != at(documents, p - 1));
            run = begins ? 1 : run + 1;
            if (p >= first) visit(p, run);
            if (++in_sequence == time) in_sequence = 0;
        }
    }
};

// Writes the rows of all n-grams, position by position, and where each bag starts, and the end of
// the last. Returns the number of rows, or -1 if a token is negative.
inline int64_t hash_ngrams(const Ngrams& ngrams, int64_t* rows, int64_t* starts, int threads) {
    constexpr int64_t piece = 1 << 11;
    const int64_t tasks = (ngrams.positions + piece - 1) / piece;
    const auto last_of = [&](int64_t task) {
        return std::min((task + 1) * piece, ngrams.positions);
    };
    std::vector<int64_t> begins(size_t(tasks) + 1, 0);
    std::atomic<bool> good{true};
    parallel(threads, tasks, [&](int64_t task) {
        int64_t count = 0;
        ngrams.each_run(task * piece, last_of(task), [&](int64_t p, int64_t run) {
            for (const int64_t order : ngrams.orders) count += order <= run ? ngrams.heads : 0;
            if (at(ngrams.tokens, p) < 0) good = false;
        });
        begins[size_t(task) + 1] = count;
    });
    if (!good) return -1;
    for (size_t task = 0; task < size_t(tasks); ++task) begins[task + 1] += begins[task];
    std::vector<uint64_t> keys;  // of each order and head
    for (const int64_t order : ngrams.orders) {
        const uint64_t of_order = splitmix(splitmix(ngrams.seed) ^ uint64_t(order));
        for (int64_t head = 0; head < ngrams.heads; ++head) {
            keys.push_back(splitmix(of_order ^ uint64_t(head)));
        }
    }
    parallel(threads, tasks, [&](int64_t task) {
        int64_t to = begins[size_t(task)];
        int64_t* start = starts + task * piece * (ngrams.bags() / ngrams.positions);
        ngrams.each_run(task * piece, last_of(task), [&](int64_t p, int64_t run) {
            if (!ngrams.is_split) *start++ = to;
            const uint64_t* key = keys.data();
            for (const int64_t order : ngrams.orders) {
                for (int64_t head = 0; head < ngrams.heads; ++head, ++key) {
                    if (ngrams.is_split) *start++ = to;
                    if (order > run) continue;
                    uint64_t hash = *key;
                    for (int64_t i = p - order + 1; i <= p; ++i) {
                        hash =
                            splitmix((hash ^ uint64_t(at(ngrams.tokens, i))) + 0x9e3779b97f4a7c15u);
                    }
                    const int64_t row = int64_t((hash >> 1) % ngrams.rows);
                    // While the next hashes are computed, the processor walks its page tables,
                    // which are in no cache if the table is large.
                    if (ngrams.table) __builtin_prefetch(ngrams.table + row * ngrams.row_bytes);
                    rows[to++] = row;
                }
            }
        });
    });
    starts[ngrams.bags()] = begins.back();
    return begins.back();
}

}  // namespace sparsestep
