// Finds duplicate indices and groups their entries by slot.
//
// A gradient has slots in any order, with duplicates. The update loop visits each slot once: first
// unique entries in the order of the gradient, so that values are read front to back, then the
// duplicates slot by slot, in order of appearance. Ascending indices are unique; the scan checks
// this. Otherwise each entry becomes a 64-bit key, slot in the high bits and entry in the low ones.
// Keys are scattered into buckets in parallel, in order, and each bucket goes through a hash table
// that fits the cache. For a short gradient and a table that is not much larger, two bits per slot
// identify the unique entries first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/types.h"

namespace sparsestep {

// Groups the entries of one job. Call the methods in this order; those that take a chunk or bucket
// may run in parallel.
class Dedup {
public:
    explicit Dedup(const Job& job);

    int64_t chunks() const { return chunks_; }
    void scan(int64_t chunk);            // range and order of the indices
    int64_t first_out_of_range() const;  // -1: every index is a slot
    bool ascending() const;              // strictly, so all entries are unique

    int64_t scratch_words() const;  // 64-bit words that the next steps need
    void set_scratch(uint64_t* scratch);
    void set_indices(const int64_t* copy) { indices_ = copy; }  // a copy of the indices
    // Without buckets, count() to scatter() are not needed.
    bool has_buckets() const { return bucket_bits_ > 0; }
    void count(int64_t chunk);
    void place_buckets();
    void scatter(int64_t chunk);

    int64_t buckets() const { return int64_t(1) << bucket_bits_; }
    void group(int64_t bucket);  // finds the groups of the bucket's entries
    const DuplicateSlot* groups() const { return groups_; }
    const Entry* duplicate_entries() const { return duplicate_entries_; }

    // A bucket's range of groups, and the number of their entries.
    struct Range {
        int64_t begin, end, entries;
    };
    Range range(int64_t bucket) const { return ranges_[std::size_t(bucket)]; }
    bool repeats() const;  // false: every entry is unique

    // Removes groups of at least `length` entries from their ranges; returns their indices.
    std::vector<int64_t> take_large_groups(int64_t length);

    // Lists the unique entries of [begin, end) in unique_entries(), from `begin` on; returns the
    // end of the list. Disjoint ranges of [0, unique_span()) may be listed in parallel.
    int64_t unique_span() const;  // call before take_large_groups
    int64_t list_unique(int64_t begin, int64_t end);
    const Entry* unique_entries() const { return unique_entries_; }

private:
    int64_t chunk_begin(int64_t chunk) const { return chunk * chunk_size_; }
    int64_t chunk_end(int64_t chunk) const;
    int64_t bucket_begin(int64_t bucket) const;
    int64_t words_of_bits() const { return marks_slots_ ? (num_slots_ + 63) / 64 : 0; }
    int64_t collect_repeated();
    void group_keys(int64_t bucket, int64_t begin, int64_t count);

    // A gradient of up to most_in_one entries is one chunk. A longer one has up to max_chunks, each
    // long enough to outweigh the cost of starting it.
    static constexpr int64_t most_in_one = 8192;
    static constexpr int64_t min_chunk_size = 2048;
    static constexpr int64_t max_chunks = 64;
    static int64_t chunk_size_for(int64_t entries);
    static constexpr int64_t bucket_size = 2048;
    static constexpr int64_t most_in_cache = bucket_size + bucket_size / 2;
    static constexpr int max_bucket_bits = 10;
    static constexpr int64_t most_slots_per_entry = 64;  // limit for marking slots in bits

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
    uint64_t* tables_ = nullptr;  // for buckets that exceed the cache
    uint64_t* bits_ = nullptr;    // two for each slot
    uint64_t* counts_ = nullptr;  // [chunk][bucket]: entries; later, write offsets
    DuplicateSlot* groups_ = nullptr;
    Entry* duplicate_entries_ = nullptr;
    Entry* unique_entries_ = nullptr;
    bool* repeated_ = nullptr;  // for each entry
    std::vector<Range> ranges_;
};

}  // namespace sparsestep
