#include "unique.h"

#include <algorithm>
#include <stdexcept>

namespace sparsestep {
namespace {

int bits_for(int64_t count) {  // the bits that hold 0 .. count-1
    return count <= 1 ? 0 : 64 - __builtin_clzll(uint64_t(count - 1));
}

}  // namespace

Partition::Partition(const Job& job)
    : positions_(job.positions),
      entries_(job.entries),
      slots_(job.slots),
      chunks_(job.positions ? (job.entries + chunk_size - 1) / chunk_size : 0),
      entry_bits_(bits_for(job.entries)),
      slot_bits_(bits_for(job.slots)) {
    if (entry_bits_ + slot_bits_ > 64) {
        throw std::length_error("a gradient with this many entries for this many slots");
    }
    bucket_bits_ = std::min({bits_for(job.entries / bucket_size), max_bucket_bits, slot_bits_});
    range_shift_ = slot_bits_ - bucket_bits_;
    inspections_.resize(size_t(chunks_));
}

int64_t Partition::chunk_end(int64_t chunk) const {
    return std::min(entries_, (chunk + 1) * chunk_size);
}

void Partition::inspect(int64_t chunk) {
    const int64_t begin = chunk_begin(chunk), end = chunk_end(chunk);
    const uint64_t slots = uint64_t(slots_);
    bool bad = false, descending = false;
    int64_t previous = begin > 0 ? positions_[begin - 1] : INT64_MIN;
    for (int64_t i = begin; i < end; ++i) {
        const int64_t position = positions_[i];
        bad |= uint64_t(position) >= slots;  // negative positions become huge
        descending |= position < previous;
        previous = position;
    }
    int64_t first_bad = -1;
    if (bad) {
        first_bad = begin;
        while (uint64_t(positions_[first_bad]) < slots) ++first_bad;
    }
    inspections_[size_t(chunk)] = {first_bad, !descending};
}

int64_t Partition::first_bad_entry() const {
    for (const Inspection& inspection : inspections_) {
        if (inspection.first_bad >= 0) return inspection.first_bad;
    }
    return -1;
}

bool Partition::sorted() const {
    return std::all_of(inspections_.begin(), inspections_.end(),
                       [](const Inspection& inspection) { return inspection.sorted; });
}

int64_t Partition::scratch_words() const {
    if (sorted()) return 0;
    const int64_t counts = bucket_bits_ == 0 ? 0 : 2 * (chunks_ << bucket_bits_);
    return 2 * entries_ + counts;
}

void Partition::use_scratch(uint64_t* scratch) {
    keys_ = scratch;
    spare_ = keys_ + entries_;
    counts_ = spare_ + entries_;
}

uint64_t Partition::key(int64_t entry) const {
    return uint64_t(positions_[entry]) << entry_bits_ | uint64_t(entry);
}

// Spreads neighbouring slots over all buckets, and slots at regular distances too. Within a bucket
// the bits above the lowest bucket_bits_ still tell slots apart, so sorting by those is enough.
int64_t Partition::mixed_bucket(uint64_t slot) const {
    const uint64_t mix = ((slot >> bucket_bits_) * 0x9e3779b97f4a7c15u) >> (64 - bucket_bits_);
    return int64_t((slot ^ mix) & ((uint64_t(1) << bucket_bits_) - 1));
}

void Partition::count(int64_t chunk) {
    const int64_t buckets = int64_t(1) << bucket_bits_;
    uint64_t* by_range = counts_ + 2 * chunk * buckets;
    uint64_t* by_mix = by_range + buckets;
    std::fill(by_range, by_range + 2 * buckets, 0);
    for (int64_t i = chunk_begin(chunk); i < chunk_end(chunk); ++i) {
        const uint64_t slot = uint64_t(positions_[i]);
        ++by_range[range_bucket(slot)];
        ++by_mix[mixed_bucket(slot)];
    }
}

// Buckets of neighbouring slots walk memory in one direction, which is best, unless a popular region
// makes one of them too large to share out; then slots are spread over the buckets.
void Partition::choose_buckets(int threads) {
    const int64_t buckets = int64_t(1) << bucket_bits_;
    std::vector<int64_t> totals(size_t(2 * buckets), 0);
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        const uint64_t* counts = counts_ + 2 * chunk * buckets;
        for (int64_t bucket = 0; bucket < 2 * buckets; ++bucket) {
            totals[size_t(bucket)] += int64_t(counts[bucket]);
        }
    }
    const int64_t largest = *std::max_element(totals.begin(), totals.begin() + buckets);
    mixed_ = threads > 1 && largest > std::max(2 * bucket_size, entries_ / (4 * threads));
    const int64_t* chosen = totals.data() + (mixed_ ? buckets : 0);
    bucket_begin_.assign(size_t(buckets + 1), 0);
    for (int64_t bucket = 0; bucket < buckets; ++bucket) {
        int64_t at = bucket_begin_[size_t(bucket)];
        bucket_begin_[size_t(bucket + 1)] = at + chosen[bucket];
        for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
            uint64_t& cell = counts_[(2 * chunk + mixed_) * buckets + bucket];
            const int64_t here = int64_t(cell);
            cell = uint64_t(at);
            at += here;
        }
    }
}

void Partition::deal(int64_t chunk) {
    const int64_t buckets = int64_t(1) << bucket_bits_;
    uint64_t* next = counts_ + (2 * chunk + mixed_) * buckets;
    const int64_t begin = chunk_begin(chunk), end = chunk_end(chunk);
    if (mixed_) {
        for (int64_t i = begin; i < end; ++i) keys_[next[mixed_bucket(uint64_t(positions_[i]))]++] = key(i);
    } else {
        for (int64_t i = begin; i < end; ++i) keys_[next[range_bucket(uint64_t(positions_[i]))]++] = key(i);
    }
}

int64_t Partition::pieces() const {
    return keys_ ? int64_t(1) << bucket_bits_ : chunks_;
}

// The first entry from here on that begins a new slot; for sorted positions.
int64_t Partition::run_boundary(int64_t entry) const {
    while (entry > 0 && entry < entries_ && positions_[entry] == positions_[entry - 1]) ++entry;
    return entry;
}

int64_t Partition::piece_size(int64_t piece) const {
    if (!keys_ || bucket_bits_ == 0) return chunk_end(piece) - chunk_begin(piece);
    return bucket_begin_[size_t(piece + 1)] - bucket_begin_[size_t(piece)];
}

Entries Partition::entries(int64_t piece) const {
    if (!keys_) {
        const int64_t begin = run_boundary(chunk_begin(piece));
        return {nullptr, begin, run_boundary(chunk_end(piece)) - begin};
    }
    if (bucket_bits_ == 0) {
        for (int64_t i = 0; i < entries_; ++i) keys_[i] = key(i);
        return {sort(keys_, spare_, entries_), 0, entries_};
    }
    const int64_t begin = bucket_begin_[size_t(piece)];
    const int64_t count = piece_size(piece);
    return {sort(keys_ + begin, spare_ + begin, count), 0, count};
}

// Sorts by slot, keeping the order of appearance. Returns where the result is: keys or spare.
const uint64_t* Partition::sort(uint64_t* keys, uint64_t* spare, int64_t count) const {
    if (count <= 32) {
        for (int64_t i = 1; i < count; ++i) {
            const uint64_t key = keys[i];
            int64_t at = i;
            for (; at > 0 && keys[at - 1] > key; --at) keys[at] = keys[at - 1];
            keys[at] = key;
        }
        return keys;
    }
    const int low = entry_bits_ + (mixed_ ? bucket_bits_ : 0);
    const int bits = slot_bits_ - bucket_bits_;
    constexpr int widest = 8;
    const int width = std::clamp(bits_for(count), 4, widest);
    const int passes = (bits + width - 1) / width;
    const int digit_bits = passes ? (bits + passes - 1) / passes : 0;
    const uint64_t mask = (uint64_t(1) << digit_bits) - 1;
    for (int pass = 0; pass < passes; ++pass) {
        const int shift = low + pass * digit_bits;
        uint32_t places[1 << widest] = {};
        for (int64_t i = 0; i < count; ++i) ++places[keys[i] >> shift & mask];
        uint32_t at = 0;
        for (uint64_t digit = 0; digit <= mask; ++digit) {
            const uint32_t here = places[digit];
            places[digit] = at;
            at += here;
        }
        for (int64_t i = 0; i < count; ++i) spare[places[keys[i] >> shift & mask]++] = keys[i];
        std::swap(keys, spare);
    }
    return keys;
}

}  // namespace sparsestep
