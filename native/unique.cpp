#include "unique.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

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
      chunks_(job.whole ? 0 : (job.entries + chunk_size - 1) / chunk_size),
      entry_bits_(bits_for(job.entries)),
      slot_bits_(bits_for(job.slots)),
      bucket_bits_(std::min({bits_for(job.entries / bucket_size), max_bucket_bits, slot_bits_})),
      inspections_(size_t(chunks_)) {
    if (job.entries >= int64_t(chain_end) || entry_bits_ + slot_bits_ > 64) {
        throw std::length_error("sparsestep: a gradient must have fewer than 2147483647 entries");
    }
}

int64_t Unique::chunk_end(int64_t chunk) const {
    return std::min(entries_, (chunk + 1) * chunk_size);
}

void Unique::inspect(int64_t chunk) {
    const int64_t begin = chunk_begin(chunk), end = chunk_end(chunk);
    const uint64_t slots = uint64_t(slots_);
    uint64_t bad = 0, descents = 0;
    for (int64_t i = begin; i < end; ++i) bad |= uint64_t(uint64_t(positions_[i]) >= slots);
    for (int64_t i = std::max<int64_t>(begin, 1); i < end && !descents; ++i) {
        descents |= uint64_t(positions_[i] <= positions_[i - 1]);
    }
    int64_t first_bad = -1;
    if (bad) {
        first_bad = begin;
        while (uint64_t(positions_[first_bad]) < slots) ++first_bad;
    }
    inspections_[size_t(chunk)] = {first_bad, descents == 0};
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
    const int64_t counts = is_dealt() ? chunks_ * buckets() : 0;
    return 2 * entries_ + counts + (entries_ + 1) / 2;
}

void Unique::use_scratch(uint64_t* scratch) {
    keys_ = scratch;
    spare_ = keys_ + entries_;
    links_ = reinterpret_cast<Link*>(spare_ + entries_);
    counts_ = spare_ + entries_ + (entries_ + 1) / 2;
    longest_.assign(size_t(2 * buckets()), 0);
}

uint64_t Unique::key(int64_t entry) const {
    return uint64_t(positions_[entry]) << entry_bits_ | uint64_t(entry);
}

// Spreads neighbouring slots over all buckets, so that a popular region does not fill one of them,
// and slots at regular distances too. Within a bucket the bits above the lowest bucket_bits_ tell
// slots apart, so sorting by those is enough.
int64_t Unique::bucket_of(int64_t slot) const {
    const uint64_t upper = uint64_t(slot) >> bucket_bits_;
    const uint64_t mix = (upper * 0x9e3779b97f4a7c15u) >> (64 - bucket_bits_);
    return int64_t((uint64_t(slot) ^ mix) & uint64_t(buckets() - 1));
}

void Unique::count(int64_t chunk) {
    uint64_t* counts = counts_ + chunk * buckets();
    std::fill(counts, counts + buckets(), 0);
    for (int64_t i = chunk_begin(chunk); i < chunk_end(chunk); ++i) {
        ++counts[bucket_of(positions_[i])];
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

void Unique::deal(int64_t chunk) {
    uint64_t* next = counts_ + chunk * buckets();
    for (int64_t i = chunk_begin(chunk); i < chunk_end(chunk); ++i) {
        keys_[next[bucket_of(positions_[i])]++] = key(i);
        links_[i] = chain_end;
    }
}

void Unique::link(int64_t bucket) {
    int64_t begin = 0, count = entries_;
    if (is_dealt()) {
        begin = bucket_begin_[size_t(bucket)];
        count = bucket_begin_[size_t(bucket + 1)] - begin;
    } else {
        for (int64_t i = 0; i < entries_; ++i) {
            keys_[i] = key(i);
            links_[i] = chain_end;
        }
    }
    const uint64_t* keys = sort(keys_ + begin, spare_ + begin, count);
    const uint64_t mask = (uint64_t(1) << entry_bits_) - 1;
    int64_t* longest = longest_.data() + 2 * bucket;
    int64_t first = 0;
    for (int64_t i = 1; i <= count; ++i) {
        if (i < count && (keys[i] ^ keys[i - 1]) >> entry_bits_ == 0) {
            const Link entry = Link(keys[i] & mask);
            links_[keys[i - 1] & mask] += entry - chain_end;  // keeps a mark that is there
            links_[entry] = chain_end | taken;
            continue;
        }
        if (i - first > longest[1]) {
            longest[0] = int64_t(keys[first] & mask);
            longest[1] = i - first;
        }
        first = i;
    }
}

std::vector<int64_t> Unique::heavy(int64_t length) {
    std::vector<int64_t> found;
    for (int64_t bucket = 0; bucket < buckets(); ++bucket) {
        if (longest_[size_t(2 * bucket + 1)] < length) continue;
        found.push_back(longest_[size_t(2 * bucket)]);
        links_[found.back()] |= taken;
    }
    return found;
}

// Sorts by slot, keeping the order of appearance. Returns where the result is: keys or spare.
const uint64_t* Unique::sort(uint64_t* keys, uint64_t* spare, int64_t count) const {
    if (count <= 32) {
        for (int64_t i = 1; i < count; ++i) {
            const uint64_t key = keys[i];
            int64_t at = i;
            for (; at > 0 && keys[at - 1] > key; --at) keys[at] = keys[at - 1];
            keys[at] = key;
        }
        return keys;
    }
    constexpr int widest = 8;
    const int low = entry_bits_ + bucket_bits_;
    const int bits = slot_bits_ - bucket_bits_;
    const int passes = (bits + widest - 1) / widest;
    const int width = passes ? (bits + passes - 1) / passes : 0;
    const uint64_t mask = (uint64_t(1) << width) - 1;
    for (int pass = 0; pass < passes; ++pass) {
        const int shift = low + pass * width;
        uint32_t places[1 << widest] = {};
        for (int64_t i = 0; i < count; ++i) ++places[keys[i] >> shift & mask];
        uint32_t at = 0;
        for (uint64_t digit = 0; digit <= mask; ++digit) at += std::exchange(places[digit], at);
        for (int64_t i = 0; i < count; ++i) spare[places[keys[i] >> shift & mask]++] = keys[i];
        std::swap(keys, spare);
    }
    return keys;
}

}  // namespace sparsestep
