// From indices to groups of entries that have the same slot.
//
// A gradient names slots in any order, with repetitions. The loop wants each slot once: the entries
// that are alone with their slot in the order of the gradient, which is then read from front to
// back, and the others slot by slot, side by side, in order of appearance. Indices in ascending
// order are all alone (they are looked at, never trusted to be so). Otherwise each entry becomes
// one 64-bit key, slot in the high bits and entry in the low ones; the keys are scattered into
// buckets in parallel, keeping their order, and each bucket is run through a hash table that fits
// the cache. Of a short gradient for a table that is not much larger, two bits for each slot tell
// beforehand which entries are alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/types.h"

namespace sparsestep {

// Finds the groups of one job. The steps are called in the order in which they stand here; those
// that take a number may run in parallel, for all numbers below the count above them.
class Dedup {
public:
    explicit Dedup(const Job& job);

    int64_t chunks() const { return chunks_; }
    void scan(int64_t chunk);            // range and order of the indices
    int64_t first_out_of_range() const;  // -1: every index is a slot
    bool ascending() const;              // strictly: no repetitions, so nothing further to do

    int64_t scratch_words() const;  // 64-bit words that the next steps need
    void set_scratch(uint64_t* scratch);
    void set_indices(const int64_t* copy) { indices_ = copy; }  // the same ones, elsewhere
    // Without buckets, count() to scatter() are not needed.
    bool has_buckets() const { return bucket_bits_ > 0; }
    void count(int64_t chunk);
    void place_buckets();
    void scatter(int64_t chunk);

    int64_t buckets() const { return int64_t(1) << bucket_bits_; }
    void group(int64_t bucket);  // finds the groups of the bucket's entries
    const DuplicateSlot* groups() const { return groups_; }
    const Entry* duplicate_entries() const { return duplicate_entries_; }

    // The numbers of a bucket's groups, and how many entries they have.
    struct Range {
        int64_t begin, end, entries;
    };
    Range range(int64_t bucket) const { return ranges_[std::size_t(bucket)]; }
    bool repeats() const;  // false: every entry is unique

    // Takes the groups that have at least `length` entries out of their ranges; returns their
    // numbers.
    std::vector<int64_t> take_large_groups(int64_t length);

    // Lists the unique entries of [begin, end) in unique_entries(), from `begin` on; returns where
    // the list ends. They are all within [0, span_of_alone()), and ranges of it may be listed in
    // parallel.
    int64_t unique_span() const;  // to be called before groups are taken
    int64_t list_unique(int64_t begin, int64_t end);
    const Entry* unique_entries() const { return unique_entries_; }

private:
    int64_t chunk_begin(int64_t chunk) const { return chunk * chunk_size_; }
    int64_t chunk_end(int64_t chunk) const;
    int64_t bucket_begin(int64_t bucket) const;
    int64_t words_of_bits() const { return marks_slots_ ? (num_slots_ + 63) / 64 : 0; }
    int64_t collect_repeated();
    void group_keys(int64_t bucket, int64_t begin, int64_t count);

    // A gradient of up to most_in_one entries is one chunk. A longer one has chunks for as many
    // threads as machines have, none so short that fetching it costs more than its work.
    static constexpr int64_t most_in_one = 8192;
    static constexpr int64_t min_chunk_size = 2048;
    static constexpr int64_t max_chunks = 64;
    static int64_t chunk_size_for(int64_t entries);
    static constexpr int64_t bucket_size = 2048;
    static constexpr int64_t most_in_cache = bucket_size + bucket_size / 2;
    static constexpr int max_bucket_bits = 10;
    static constexpr int64_t most_slots_per_entry = 64;  // of a gradient for which bits are cleared

    struct Scan {
        int64_t first_bad;
        bool ascending;
    };

    const int64_t* indices_;
    int64_t entries_;
    int64_t num_slots_;
    int64_t chunk_size_;
    int64_t chunks_;
    bool marks_slots_;  // see collect_repeated
    int entry_bits_, slot_bits_, bucket_bits_;
    std::vector<Scan> scans_;
    std::vector<int64_t> bucket_begin_;
    uint64_t* keys_ = nullptr;
    uint64_t* tables_ = nullptr;  // of buckets with very many entries
    uint64_t* bits_ = nullptr;    // two for each slot
    uint64_t* counts_ = nullptr;  // [chunk][bucket]: how many entries; later, where they go
    DuplicateSlot* groups_ = nullptr;
    Entry* duplicate_entries_ = nullptr;
    Entry* unique_entries_ = nullptr;
    bool* repeated_ = nullptr;  // for each entry
    std::vector<Range> ranges_;
};

}  // namespace sparsestep
