// Which row each id has, where ids are any 64 bits and rows are few.
//
// Open addressing: a slot has 32 bits of the id's hash and the number of a record; a record has the
// id, how often it was seen and when. A lookup reads one slot and one record, and asks for both
// ahead of time. The hash has a key that nobody knows, so no one can make up ids that collide. What
// row an id has does not depend on it: rows are given in order of appearance.
#pragma once

#include <cstdint>
#include <vector>

#include "core/lazy.h"
#include "core/victims.h"

namespace sparsestep {

enum class Eviction { none, lru, lfu };

struct VocabularyOptions {
    int64_t rows, shared;  // rows [0, shared) are for ids that have none of their own
    int64_t admit;         // how often an id has to be seen to get a row
    int64_t candidates;    // how many ids without a row are counted at most
    Eviction eviction;
    int64_t fades_after;  // with lfu: counts are halved after so many sightings
    uint64_t keys[2];     // of the hash
};

// A vocabulary as tensors have it: of rows, then of candidates, the one seen last at the end.
struct VocabularyArrays {
    int64_t *ids, *counts, *seen, *candidate_ids, *candidate_counts;
};
struct VocabularySizes {
    int64_t used, candidates, sightings;
};

class Vocabulary {
public:
    explicit Vocabulary(const VocabularyOptions& options);

    // The row of each id; a shared one where it has none. Returns how many have none.
    int64_t find(const int64_t* ids, int64_t count, int64_t* rows, int threads) const;

    // The same, and those that have a row were seen once more. `before` gets what uncount() needs
    // to make that undone; room for `count`.
    int64_t find_and_count(const int64_t* ids, int64_t count, int64_t now, int64_t* rows,
                           int64_t* before, int threads);
    void uncount(const int64_t* rows, int64_t count, const int64_t* before);

    // Then take note of the others, and give rows to those that have been seen often enough; `rows`
    // are then theirs. Rows that were seen since the clock was other than `now` are not taken from
    // anybody. Returns which rows were, in order; room for as many as have none.
    int64_t admit(const int64_t* ids, int64_t count, int64_t now, int64_t* rows, int64_t* taken);

    VocabularySizes sizes() const { return {used_, candidates_used(), sightings_}; }
    void save(const VocabularyArrays& to) const;
    // Into one that has seen nothing; false, and nothing is loaded, where an id comes twice.
    bool load(const VocabularyArrays& from, const VocabularySizes& sizes, int64_t now);
    int64_t bytes() const;

private:
    struct Slot {
        uint32_t tag, number;  // of the record, counted from 1; 0: none
    };
    struct Record {
        int64_t id;
        uint32_t count, seen;
    };
    struct Candidate {
        int64_t id;
        uint64_t count : 16, serial : 48;  // 0: none; larger if seen later
    };
    static constexpr uint64_t most_counted_candidate = (1 << 16) - 1;
    struct New;  // an id without a row, in one call of see()

    uint32_t tag_of(int64_t id) const;
    int64_t home_of(uint32_t tag) const { return int64_t(uint64_t(tag) * slots_count_ >> 32); }
    int64_t shared_row(int64_t id) const;
    int64_t id_of(uint32_t number) const;
    int64_t slot_of(int64_t id, uint32_t tag) const;  // -1: none
    void insert(int64_t id, uint32_t number);
    void erase(int64_t id);
    template <class Known>
    void find_some(const int64_t* ids, int64_t count, int64_t* rows, const Known& known) const;
    int64_t count_one(int64_t row, uint32_t now);
    std::vector<New> distinct(const int64_t* ids, const int64_t* rows, int64_t count,
                              std::vector<int32_t>& which) const;
    void place(New& id, uint32_t now, int64_t*& taken);
    int64_t free_row(uint32_t now, int64_t*& taken);
    void remember(const New& id, int64_t known);
    void fade();
    uint64_t key_of(uint32_t row) const;
    int64_t candidates_used() const { return next_candidate_ - int64_t(spare_candidates_.size()); }

    VocabularyOptions options_;
    uint64_t slots_count_;
    LazyArray<Slot> slots_;
    LazyArray<Record> records_;
    LazyArray<Candidate> candidates_;
    std::vector<uint32_t> spare_candidates_;
    int64_t used_, next_candidate_ = 0, sightings_ = 0;
    uint64_t serial_ = 0, batch_serial_ = 0;
    int64_t latest_ = -1;  // what the clock said
    Victims victims_, candidate_victims_;
};

}  // namespace sparsestep
