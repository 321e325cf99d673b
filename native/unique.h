// From positions to runs of equal slots.
//
// A gradient lists slots in any order, with repetitions. The loop wants the entries of a slot
// together, in order of appearance. Positions that are sorted already are used as they are (checked,
// never trusted). Otherwise each entry becomes one 64-bit key, slot in the high bits and entry in
// the low ones; the keys are dealt into buckets in parallel and each bucket is radix-sorted when
// its turn comes, while it is in the cache.
#pragma once

#include <cstdint>
#include <vector>

#include "types.h"

namespace sparsestep {

// How the entries of one job are dealt out.
class Partition {
public:
    explicit Partition(const Job& job);

    // The steps below are run in this order; those that take a chunk may run in parallel.
    int64_t chunks() const { return chunks_; }
    void inspect(int64_t chunk);          // range and order of the positions
    int64_t first_bad_entry() const;      // -1: every position is a slot
    bool sorted() const;                  // nothing further to do: use the positions as they are
    int64_t scratch_words() const;        // what deal() needs, in 64-bit words
    void use_scratch(uint64_t* scratch);
    bool is_dealt() const { return keys_ && bucket_bits_ > 0; }  // else count() to deal() are idle
    void count(int64_t chunk);
    void choose_buckets(int threads);
    void deal(int64_t chunk);

    // A piece of the job whose slots no other piece has.
    int64_t pieces() const;
    int64_t piece_size(int64_t piece) const;
    Entries entries(int64_t piece) const;  // sorts the piece's bucket

    int32_t entry_bits() const { return entry_bits_; }

private:
    int64_t chunk_begin(int64_t chunk) const { return chunk * chunk_size; }
    int64_t chunk_end(int64_t chunk) const;
    int64_t run_boundary(int64_t entry) const;
    uint64_t key(int64_t entry) const;
    int64_t range_bucket(uint64_t slot) const { return int64_t(slot >> range_shift_); }
    int64_t mixed_bucket(uint64_t slot) const;
    int64_t bucket_of(uint64_t slot) const { return mixed_ ? mixed_bucket(slot) : range_bucket(slot); }
    const uint64_t* sort(uint64_t* keys, uint64_t* spare, int64_t count) const;

    static constexpr int64_t chunk_size = 16384;
    static constexpr int64_t bucket_size = 512;
    static constexpr int max_bucket_bits = 10;

    const int64_t* positions_;
    int64_t entries_;
    int64_t slots_;
    int64_t chunks_;
    int32_t entry_bits_;
    int32_t slot_bits_;
    int32_t bucket_bits_;
    int32_t range_shift_;
    bool mixed_ = false;
    struct Inspection {
        int64_t first_bad;
        bool sorted;
    };
    std::vector<Inspection> inspections_;
    std::vector<int64_t> bucket_begin_;
    uint64_t* keys_ = nullptr;
    uint64_t* spare_ = nullptr;
    // Per chunk: how many entries go to each bucket, by range and mixed; then where they go.
    uint64_t* counts_ = nullptr;
};

}  // namespace sparsestep
