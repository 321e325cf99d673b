// Which row each id has, where ids are any 64 bits and rows are few.
//
// Open addressing: a slot has 32 bits of the id's hash and the number of a record; a record has the
// id, how often it was seen and when. A lookup reads one slot and one record, and asks for both
// ahead of time. The hash has a secret key, so ids cannot be chosen to collide. What
// row an id has does not depend on it: rows are given in order of appearance.
#pragma once

#include <cstdint>
#include <vector>

#include "core/eviction.h"
#include "core/memory.h"

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

    // The row of each id; a shared row if it has none. Returns the number of ids without a row.
    int64_t find(const int64_t* ids, int64_t count, int64_t* rows, int threads) const;

    // Look up ids in training: count all ids, and assign rows to ids that have been seen often
    // enough. Provisional until commit(); rollback() undoes it, and so does the next claim(). Rows
    // seen at `now` are not evicted. `taken` receives the evicted rows, in order; both outputs need
    // room for `count`. If this throws, nothing has changed.
    struct Claim {
        int64_t without, taken;  // ids that had no row, rows that were evicted
    };
    Claim claim(const int64_t* ids, int64_t count, int64_t now, int64_t* rows, int64_t* taken,
                int threads);
    void commit() noexcept;    // of the latest claim; neither allocates nor throws
    void rollback() noexcept;  // nothing to do if no claim is pending

    VocabularySizes sizes() const { return {used_, candidates_used(), sightings_}; }
    void save(const VocabularyArrays& to) const;
    // Replace everything; false, and nothing has changed, if an id occurs twice.
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
    struct New;  // an id without a row, in one claim
    struct Counted {
        uint32_t row, count, seen;  // of a record before it was counted
    };
    enum class Change {
        row_assigned,       // a free row
        row_evicted,        // record: the evicted one
        candidate_removed,  // candidate: got a row, its entry is now a spare one
        candidate_counted,  // candidate: before it was counted once more
        candidate_evicted,  // candidate: the evicted one
        candidate_appended,
        candidate_from_spare,
    };
    struct Undo {
        Change change;
        uint32_t index;
        Record record;
        Candidate candidate;
    };
    // What rollback() needs. The vectors are reserved before anything changes.
    struct Pending {
        bool is_claimed = false;
        int64_t count, used, next_candidate, latest;
        uint64_t serial, batch_serial;
        std::vector<Counted> counted;
        std::vector<Undo> undos;
    };

    uint32_t tag_of(int64_t id) const;
    int64_t home_of(uint32_t tag) const { return int64_t(uint64_t(tag) * slots_count_ >> 32); }
    int64_t shared_row(int64_t id) const;
    int64_t id_of(uint32_t number) const;
    int64_t slot_of(int64_t id, uint32_t tag) const;  // -1: none
    void insert(int64_t id, uint32_t number);
    void erase(int64_t id);
    template <class Known>
    void find_some(const int64_t* ids, int64_t count, int64_t* rows, const Known& known) const;
    int64_t count_known(const int64_t* ids, int64_t count, uint32_t now, int64_t* rows,
                        int threads);
    void count_one(int64_t row, uint32_t now);
    int64_t admit(const int64_t* ids, int64_t count, uint32_t now, int64_t* rows, int64_t* taken,
                  int64_t without);
    void undo(const Undo& undo);
    void close() noexcept;
    std::vector<New> distinct(const int64_t* ids, const int64_t* rows, int64_t count,
                              std::vector<int32_t>& which) const;
    void place(New& id, uint32_t now, int64_t*& taken);
    int64_t free_row(uint32_t now);
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
    int64_t latest_ = -1;  // the latest time
    EvictionQueue victims_, candidate_victims_;
    Pending pending_;
};

}  // namespace sparsestep
