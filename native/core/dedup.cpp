#include "core/dedup.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include "core/types.h"

namespace sparsestep {
namespace {

// Hashes neighboring and regularly spaced slots to all 64 bits. Buckets use the upper bits, hash
// tables the lower half, so that the two are independent.
uint64_t mix(uint64_t slot) {
    const uint64_t product = (slot ^ (slot >> 32)) * 0x9e3779b97f4a7c15u;
    return product ^ (product >> 29);
}

// Average collisions per lookup before the hash table is abandoned for sorting. Otherwise slots
// chosen to collide would take quadratic time.
constexpr int64_t most_collisions = 16;

// A key whose slot is numbered: the number in the upper half, the entry in the lower.
constexpr int number_shift = 32;
constexpr uint64_t entry_mask = (uint64_t(1) << number_shift) - 1;

// Marks which of the bits bit_of(begin) to bit_of(end - 1) occur, and which occur twice. Returns
// the number of repetitions. No branch depends on the data: it would be mispredicted.
template <class BitOf>
int64_t mark_repeated(uint64_t* seen, uint64_t* repeated, int64_t begin, int64_t end,
                      const BitOf& bit_of) {
    int64_t found = 0;
    for (int64_t i = begin; i < end; ++i) {
        const uint64_t at = bit_of(i), bit = uint64_t(1) << (at & 63);
        const uint64_t before = seen[at >> 6] & bit;
        repeated[at >> 6] |= before;
        seen[at >> 6] |= bit;
        found += before != 0;
    }
    return found;
}

inline int64_t is_marked(const uint64_t* bits, uint64_t at) {
    return int64_t(bits[at >> 6] >> (at & 63) & 1);
}

// Drops keys whose slot is unique, judged by 16 bits of its hash. Skipped if a sample of the first
// keys has too few unique ones. Returns the number of remaining keys.
int64_t drop_singletons(uint64_t* keys, int64_t count, int entry_bits) {
    constexpr int64_t sample = 256, most_repeated = sample / 8;
    if (count < 2 * sample) return count;
    uint64_t seen[1024] = {}, repeated[1024] = {};
    const auto hash_of = [&](int64_t i) { return mix(keys[i] >> entry_bits) & 0xffff; };
    if (mark_repeated(seen, repeated, 0, sample, hash_of) > most_repeated) return count;
    mark_repeated(seen, repeated, sample, count, hash_of);
    int64_t left = 0;
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t hash = hash_of(i);
        keys[left] = keys[i];
        left += is_marked(repeated, hash);
    }
    return left;
}

// Keys and their slots, which are numbered from 1. Number is the shortest type that fits, so that
// everything stays in the cache.
template <class Number>
struct BucketTable {
    uint64_t* keys;
    int64_t count;
    int entry_bits;
    Number* table;  // slot number by hash
    int64_t capacity;
    int64_t* num_slots;
    Number *counts, *ends;  // of each slot: its keys, and where they end
    int64_t last = 0;       // number
};

// Puts the number of its slot into each key. Returns false, with the keys unchanged, if slots
// collide too often. No branch depends on whether a slot is new: it would be mispredicted.
template <class Number>
bool assign_by_hash(BucketTable<Number>& work) {
    std::fill(work.table, work.table + work.capacity, Number(0));
    uint64_t* const keys = work.keys;
    Number *const table = work.table, *const counts = work.counts;
    int64_t* const num_slots = work.num_slots;
    const int entry_bits = work.entry_bits;
    const uint64_t capacity = uint64_t(work.capacity), mask = (uint64_t(1) << entry_bits) - 1;
    int64_t collisions_left = most_collisions * (work.count + 64);
    uint64_t last = 0;
    for (int64_t i = 0; i < work.count; ++i) {
        const int64_t slot = int64_t(keys[i] >> entry_bits);
        num_slots[0] = slot;  // an empty place compares equal
        uint64_t place = (mix(uint64_t(slot)) & 0xffffffffu) * capacity >> 32;
        while (num_slots[table[place]] != slot) {
            if (++place == capacity) place = 0;
            if (--collisions_left < 0) {
                while (i-- > 0) {
                    const uint64_t before = uint64_t(num_slots[keys[i] >> number_shift]);
                    keys[i] = before << entry_bits | (keys[i] & entry_mask);
                }
                return false;
            }
        }
        const uint64_t found = table[place], is_new = found == 0;
        last += is_new;
        const uint64_t number = found + (last & -is_new);
        num_slots[number] = slot;
        counts[number] = Number((counts[number] & (is_new - 1)) + 1);
        table[place] = Number(number);
        keys[i] = number << number_shift | (keys[i] & mask);
    }
    work.last = int64_t(last);
    return true;
}

// Numbers slots by sorting: slower, for any slots.
template <class Number>
void number_by_sorting(BucketTable<Number>& work) {
    const uint64_t mask = (uint64_t(1) << work.entry_bits) - 1;
    std::sort(work.keys, work.keys + work.count);  // by slot, then in order of appearance
    int64_t last = 0;
    for (int64_t i = 0; i < work.count; ++i) {
        const int64_t slot = int64_t(work.keys[i] >> work.entry_bits);
        if (last == 0 || work.num_slots[last] != slot) {
            work.num_slots[++last] = slot;
            work.counts[last] = 0;
        }
        ++work.counts[last];
        work.keys[i] = uint64_t(last) << number_shift | (work.keys[i] & mask);
    }
    work.last = last;
}

// Writes the groups and their entries from members[begin] on, followed by the unique entries.
// Returns the number of entries in groups, and sets `last` to the number of groups.
template <class Number>
int64_t write_groups(BucketTable<Number>& work, DuplicateSlot* groups, Entry* duplicate_entries,
                     int64_t begin) {
    Number *const counts = work.counts, *const ends = work.ends;
    uint64_t at = 0, unique_entries = uint64_t(work.count);
    int64_t kept = 0;
    for (int64_t number = 1; number <= work.last; ++number) {
        const uint64_t count = counts[number], is_alone = count == 1;
        groups[kept] = {work.num_slots[number], Entry(uint64_t(begin) + at), Entry(count)};
        kept += int64_t(1 - is_alone);
        at += count - is_alone;
        ends[number] = Number(is_alone ? unique_entries : at);
        unique_entries -= is_alone;
    }
    work.last = kept;
    for (int64_t i = work.count - 1; i >= 0; --i) {
        const uint64_t key = work.keys[i];
        duplicate_entries[begin + int64_t(--ends[key >> number_shift])] = Entry(key & entry_mask);
    }
    return int64_t(at);
}

int bits_for(int64_t count) {  // the bits that hold 0 .. count-1
    return count <= 1 ? 0 : 64 - __builtin_clzll(uint64_t(count - 1));
}

}  // namespace

Dedup::Dedup(const Job& job)
    : indices_(job.indices),
      entries_(job.entries),
      num_slots_(job.num_slots),
      chunk_size_(chunk_size_for(job.entries)),
      chunks_(job.all_slots ? 0 : (job.entries + chunk_size_ - 1) / chunk_size_),
      marks_slots_(chunks_ == 1 && job.num_slots <= most_slots_per_entry * job.entries),
      entry_bits_(bits_for(job.entries)),
      slot_bits_(bits_for(job.num_slots)),
      bucket_bits_(marks_slots_ ? 0
                                : std::min(bits_for(job.entries / bucket_size), max_bucket_bits)),
      scans_(size_t(chunks_)) {
    if (!job.all_slots && (job.entries >= max_entries || entry_bits_ + slot_bits_ > 64)) {
        throw std::length_error("sparsestep: a gradient must have fewer than 2147483647 entries");
    }
}

int64_t Dedup::chunk_size_for(int64_t entries) {
    if (entries <= most_in_one) return most_in_one;
    return std::max(min_chunk_size, (entries + max_chunks - 1) / max_chunks);
}

int64_t Dedup::chunk_end(int64_t chunk) const {
    return std::min(entries_, (chunk + 1) * chunk_size_);
}

void Dedup::scan(int64_t chunk) {
    const int64_t begin = chunk_begin(chunk), end = chunk_end(chunk);
    const int64_t* indices = indices_;
    const uint64_t last = uint64_t(num_slots_) - 1;
    // The sign bit is set if an index is negative or beyond the last slot.
    uint64_t sign = 0;
    for (int64_t i = begin; i < end; ++i) {
        const uint64_t index = uint64_t(indices[i]);
        sign |= index | (last - index);
    }
    int64_t first_bad = -1;
    if (sign >> 63) {
        first_bad = begin;
        while (uint64_t(indices[first_bad]) < uint64_t(num_slots_)) ++first_bad;
    }
    int64_t i = std::max<int64_t>(begin, 1);
    while (i < end && indices[i] > indices[i - 1]) ++i;
    scans_[size_t(chunk)] = {first_bad, i == std::max<int64_t>(end, 1)};
}

int64_t Dedup::first_out_of_range() const {
    for (const Scan& inspection : scans_) {
        if (inspection.first_bad >= 0) return inspection.first_bad;
    }
    return -1;
}

bool Dedup::ascending() const {
    return std::all_of(scans_.begin(), scans_.end(),
                       [](const Scan& inspection) { return inspection.ascending; });
}

int64_t Dedup::scratch_words() const {
    const int64_t counts = has_buckets() ? chunks_ * buckets() : 0;
    return 6 * entries_ + 4 * buckets() + counts + (entries_ + 7) / 8 + 2 * words_of_bits();
}

void Dedup::set_scratch(uint64_t* scratch) {
    keys_ = scratch;
    tables_ = keys_ + entries_;
    groups_ = reinterpret_cast<DuplicateSlot*>(tables_ + 3 * entries_ + 2 * buckets());
    duplicate_entries_ = reinterpret_cast<Entry*>(groups_ + entries_ / 2 + buckets());
    unique_entries_ = duplicate_entries_ + entries_;
    counts_ = keys_ + 6 * entries_ + 4 * buckets();
    bits_ = counts_;  // unused without buckets
    repeated_ = reinterpret_cast<bool*>(has_buckets() ? counts_ + chunks_ * buckets()
                                                      : bits_ + 2 * words_of_bits());
    ranges_.resize(size_t(buckets()));
}

void Dedup::count(int64_t chunk) {
    uint64_t* counts = counts_ + chunk * buckets();
    std::fill(counts, counts + buckets(), 0);
    const int64_t* indices = indices_;
    const int shift = 64 - bucket_bits_;
    for (int64_t i = chunk_begin(chunk), end = chunk_end(chunk); i < end; ++i) {
        ++counts[mix(uint64_t(indices[i])) >> shift];
    }
}

void Dedup::place_buckets() {
    bucket_begin_.assign(size_t(buckets() + 1), 0);
    int64_t at = 0;
    for (int64_t bucket = 0; bucket < buckets(); ++bucket) {
        for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
            uint64_t& cell = counts_[chunk * buckets() + bucket];
            at += int64_t(std::exchange(cell, uint64_t(at)));
        }
        bucket_begin_[size_t(bucket + 1)] = at;
    }
}

void Dedup::scatter(int64_t chunk) {
    const int64_t begin = chunk_begin(chunk), end = chunk_end(chunk);
    std::fill(repeated_ + begin, repeated_ + end, false);
    // Local copies: the compiler must assume that a write through keys changes the members.
    uint64_t* const next = counts_ + chunk * buckets();
    uint64_t* const keys = keys_;
    const int64_t* const indices = indices_;
    const int shift = 64 - bucket_bits_, entry_bits = entry_bits_;
    for (int64_t i = begin; i < end; ++i) {
        const uint64_t slot = uint64_t(indices[i]);
        keys[next[mix(slot) >> shift]++] = slot << entry_bits | uint64_t(i);
    }
}

int64_t Dedup::bucket_begin(int64_t bucket) const {
    if (has_buckets()) return bucket_begin_[size_t(bucket)];
    return bucket == 0 ? 0 : entries_;
}

// Lists the unique entries and makes keys of the others; returns their number. No branch depends on
// the slots: it would be mispredicted.
int64_t Dedup::collect_repeated() {
    const int64_t words = words_of_bits();
    uint64_t *const seen = bits_, *const repeated = bits_ + words, *const keys = keys_;
    const int64_t* const indices = indices_;
    std::fill(seen, seen + 2 * words, 0);
    const auto slot_of = [indices](int64_t i) { return uint64_t(indices[i]); };
    if (!mark_repeated(seen, repeated, 0, entries_, slot_of)) return entries_;
    Entry* const list = unique_entries_;
    int64_t unique_entries = 0;
    for (int64_t i = 0; i < entries_; ++i) {
        const uint64_t slot = slot_of(i);
        list[unique_entries] = Entry(i);
        keys[i - unique_entries] = slot << entry_bits_ | uint64_t(i);
        unique_entries += 1 - is_marked(repeated, slot);
    }
    return unique_entries;
}

void Dedup::group(int64_t bucket) {
    const int64_t begin = bucket_begin(bucket);
    if (marks_slots_) return group_keys(bucket, 0, entries_ - collect_repeated());
    if (!has_buckets()) {
        std::fill(repeated_, repeated_ + entries_, false);
        for (int64_t i = 0; i < entries_; ++i) {
            keys_[i] = uint64_t(indices_[i]) << entry_bits_ | uint64_t(i);
        }
    }
    group_keys(bucket, begin, bucket_begin(bucket + 1) - begin);
    const Entry* const duplicate_entries = duplicate_entries_ + begin;
    bool* const repeated = repeated_;
    for (int64_t i = 0; i < range(bucket).entries; ++i) repeated[duplicate_entries[i]] = true;
}

void Dedup::group_keys(int64_t bucket, int64_t begin, int64_t count) {
    const auto run = [&](auto work) {
        if (!assign_by_hash(work)) number_by_sorting(work);
        const int64_t first = begin / 2 + bucket;  // a group has at least two entries
        const int64_t entries = write_groups(work, groups_ + first, duplicate_entries_, begin);
        ranges_[size_t(bucket)] = {first, first + work.last, entries};
    };
    if (count <= most_in_cache) {
        if (has_buckets()) count = drop_singletons(keys_ + begin, count, entry_bits_);
        // A low load factor: a misprediction costs more than the memory.
        uint16_t table[8 * most_in_cache], counts[most_in_cache + 1], ends[most_in_cache + 1];
        int64_t num_slots[most_in_cache + 1];
        run(BucketTable<uint16_t>{keys_ + begin, count, entry_bits_, table, 8 * count, num_slots,
                                  counts, ends});
    } else {
        uint64_t* const scratch = tables_ + 3 * begin + 2 * bucket;
        uint32_t* const table = reinterpret_cast<uint32_t*>(scratch + count + 1);
        uint32_t *const counts = table + 2 * count, *const ends = counts + count + 1;
        run(BucketTable<uint32_t>{keys_ + begin, count, entry_bits_, table, 2 * count,
                                  reinterpret_cast<int64_t*>(scratch), counts, ends});
    }
}

int64_t Dedup::unique_span() const { return marks_slots_ ? entries_ - range(0).entries : entries_; }

bool Dedup::repeats() const {
    return std::any_of(ranges_.begin(), ranges_.end(),
                       [](const Range& range) { return range.entries > 0; });
}

int64_t Dedup::list_unique(int64_t begin, int64_t end) {
    if (marks_slots_) return end;  // listed by collect_repeated
    Entry* const list = unique_entries_;
    const bool* const repeated = repeated_;
    int64_t at = begin;
    for (int64_t i = begin; i < end; ++i) {
        list[at] = Entry(i);
        at += !repeated[i];
    }
    return at;
}

std::vector<int64_t> Dedup::take_large_groups(int64_t length) {
    std::vector<int64_t> found;
    for (Range& range : ranges_) {
        if (range.entries < length) continue;
        for (int64_t g = range.end - 1; g >= range.begin; --g) {
            if (groups_[g].count < length) continue;
            range.entries -= groups_[g].count;
            std::swap(groups_[g], groups_[--range.end]);
            found.push_back(range.end);
        }
    }
    return found;
}

}  // namespace sparsestep
