#include "core/dedup.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/grouping.h"

namespace sparsestep {
namespace {

int bits_for(int64_t count) {  // the bits that hold 0 .. count-1
    return count <= 1 ? 0 : 64 - __builtin_clzll(uint64_t(count - 1));
}

}  // namespace

Unique::Unique(const Job& job)
    : positions_(job.positions),
      entries_(job.entries),
      slots_(job.slots),
      chunk_size_(chunk_size_for(job.entries)),
      chunks_(job.whole ? 0 : (job.entries + chunk_size_ - 1) / chunk_size_),
      marks_slots_(chunks_ == 1 && job.slots <= most_slots_per_entry * job.entries),
      entry_bits_(bits_for(job.entries)),
      slot_bits_(bits_for(job.slots)),
      bucket_bits_(marks_slots_ ? 0
                                : std::min(bits_for(job.entries / bucket_size), max_bucket_bits)),
      inspections_(size_t(chunks_)) {
    if (!job.whole && (job.entries >= most_entries || entry_bits_ + slot_bits_ > 64)) {
        throw std::length_error("sparsestep: a gradient must have fewer than 2147483647 entries");
    }
}

int64_t Unique::chunk_size_for(int64_t entries) {
    if (entries <= most_in_one) return most_in_one;
    return std::max(min_chunk_size, (entries + max_chunks - 1) / max_chunks);
}

int64_t Unique::chunk_end(int64_t chunk) const {
    return std::min(entries_, (chunk + 1) * chunk_size_);
}

void Unique::inspect(int64_t chunk) {
    const int64_t begin = chunk_begin(chunk), end = chunk_end(chunk);
    const int64_t* positions = positions_;
    const uint64_t last = uint64_t(slots_) - 1;
    // The sign bit is set where a position is negative or beyond the last slot.
    uint64_t sign = 0;
    for (int64_t i = begin; i < end; ++i) {
        const uint64_t position = uint64_t(positions[i]);
        sign |= position | (last - position);
    }
    int64_t first_bad = -1;
    if (sign >> 63) {
        first_bad = begin;
        while (uint64_t(positions[first_bad]) < uint64_t(slots_)) ++first_bad;
    }
    int64_t i = std::max<int64_t>(begin, 1);
    while (i < end && positions[i] > positions[i - 1]) ++i;
    inspections_[size_t(chunk)] = {first_bad, i == std::max<int64_t>(end, 1)};
}

int64_t Unique::first_bad_entry() const {
    for (const Inspection& inspection : inspections_) {
        if (inspection.first_bad >= 0) return inspection.first_bad;
    }
    return -1;
}

bool Unique::ascending() const {
    return std::all_of(inspections_.begin(), inspections_.end(),
                       [](const Inspection& inspection) { return inspection.ascending; });
}

int64_t Unique::scratch_words() const {
    const int64_t counts = has_buckets() ? chunks_ * buckets() : 0;
    return 6 * entries_ + 4 * buckets() + counts + (entries_ + 7) / 8 + 2 * words_of_bits();
}

void Unique::use_scratch(uint64_t* scratch) {
    keys_ = scratch;
    tables_ = keys_ + entries_;
    groups_ = reinterpret_cast<EntryGroup*>(tables_ + 3 * entries_ + 2 * buckets());
    members_ = reinterpret_cast<Entry*>(groups_ + entries_ / 2 + buckets());
    alone_ = members_ + entries_;
    counts_ = keys_ + 6 * entries_ + 4 * buckets();
    bits_ = counts_;  // there are no buckets to count, then
    repeated_ = reinterpret_cast<bool*>(has_buckets() ? counts_ + chunks_ * buckets()
                                                      : bits_ + 2 * words_of_bits());
    ranges_.resize(size_t(buckets()));
}

void Unique::count(int64_t chunk) {
    uint64_t* counts = counts_ + chunk * buckets();
    std::fill(counts, counts + buckets(), 0);
    const int64_t* positions = positions_;
    const int shift = 64 - bucket_bits_;
    for (int64_t i = chunk_begin(chunk), end = chunk_end(chunk); i < end; ++i) {
        ++counts[mix(uint64_t(positions[i])) >> shift];
    }
}

void Unique::place_buckets() {
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

void Unique::scatter(int64_t chunk) {
    const int64_t begin = chunk_begin(chunk), end = chunk_end(chunk);
    std::fill(repeated_ + begin, repeated_ + end, false);
    // Local copies: the compiler must assume that a write through keys changes the members.
    uint64_t* const next = counts_ + chunk * buckets();
    uint64_t* const keys = keys_;
    const int64_t* const positions = positions_;
    const int shift = 64 - bucket_bits_, entry_bits = entry_bits_;
    for (int64_t i = begin; i < end; ++i) {
        const uint64_t slot = uint64_t(positions[i]);
        keys[next[mix(slot) >> shift]++] = slot << entry_bits | uint64_t(i);
    }
}

int64_t Unique::bucket_begin(int64_t bucket) const {
    if (has_buckets()) return bucket_begin_[size_t(bucket)];
    return bucket == 0 ? 0 : entries_;
}

// Lists the entries that are alone and makes keys of the others. Returns how many are alone. No
// branch depends on the slots: it would be a guess.
int64_t Unique::collect_repeated() {
    const int64_t words = words_of_bits();
    uint64_t *const seen = bits_, *const repeated = bits_ + words, *const keys = keys_;
    const int64_t* const positions = positions_;
    std::fill(seen, seen + 2 * words, 0);
    const auto slot_of = [positions](int64_t i) { return uint64_t(positions[i]); };
    if (!mark_repeated(seen, repeated, 0, entries_, slot_of)) return entries_;
    Entry* const list = alone_;
    int64_t alone = 0;
    for (int64_t i = 0; i < entries_; ++i) {
        const uint64_t slot = slot_of(i);
        list[alone] = Entry(i);
        keys[i - alone] = slot << entry_bits_ | uint64_t(i);
        alone += 1 - is_marked(repeated, slot);
    }
    return alone;
}

void Unique::group(int64_t bucket) {
    const int64_t begin = bucket_begin(bucket);
    if (marks_slots_) return group_keys(bucket, 0, entries_ - collect_repeated());
    if (!has_buckets()) {
        std::fill(repeated_, repeated_ + entries_, false);
        for (int64_t i = 0; i < entries_; ++i) {
            keys_[i] = uint64_t(positions_[i]) << entry_bits_ | uint64_t(i);
        }
    }
    group_keys(bucket, begin, bucket_begin(bucket + 1) - begin);
    const Entry* const members = members_ + begin;
    bool* const repeated = repeated_;
    for (int64_t i = 0; i < range(bucket).entries; ++i) repeated[members[i]] = true;
}

void Unique::group_keys(int64_t bucket, int64_t begin, int64_t count) {
    const auto run = [&](auto work) {
        if (!number_by_hash(work)) number_by_sorting(work);
        const int64_t first = begin / 2 + bucket;  // a group has at least two entries
        const int64_t entries = place_members(work, groups_ + first, members_, begin);
        ranges_[size_t(bucket)] = {first, first + work.last, entries};
    };
    if (count <= most_in_cache) {
        if (has_buckets()) count = drop_alone(keys_ + begin, count, entry_bits_);
        // Sparsely filled, most lookups succeed at once: a wrong guess costs more than the memory.
        uint16_t table[8 * most_in_cache], counts[most_in_cache + 1], ends[most_in_cache + 1];
        int64_t slots[most_in_cache + 1];
        run(Grouping<uint16_t>{keys_ + begin, count, entry_bits_, table, 8 * count, slots, counts,
                               ends});
    } else {
        uint64_t* const scratch = tables_ + 3 * begin + 2 * bucket;
        uint32_t* const table = reinterpret_cast<uint32_t*>(scratch + count + 1);
        uint32_t *const counts = table + 2 * count, *const ends = counts + count + 1;
        run(Grouping<uint32_t>{keys_ + begin, count, entry_bits_, table, 2 * count,
                               reinterpret_cast<int64_t*>(scratch), counts, ends});
    }
}

int64_t Unique::span_of_alone() const {
    return marks_slots_ ? entries_ - range(0).entries : entries_;
}

bool Unique::repeats() const {
    return std::any_of(ranges_.begin(), ranges_.end(),
                       [](const Range& range) { return range.entries > 0; });
}

int64_t Unique::list_alone(int64_t begin, int64_t end) {
    if (marks_slots_) return end;  // they have been listed
    Entry* const list = alone_;
    const bool* const repeated = repeated_;
    int64_t at = begin;
    for (int64_t i = begin; i < end; ++i) {
        list[at] = Entry(i);
        at += !repeated[i];
    }
    return at;
}

std::vector<int64_t> Unique::take_heavy(int64_t length) {
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
