#include "core/unique.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace sparsestep {
namespace {

int bits_for(int64_t count) {  // the bits that hold 0 .. count-1
    return count <= 1 ? 0 : 64 - __builtin_clzll(uint64_t(count - 1));
}

// Spreads neighbouring slots, and slots at regular distances, over all 64 bits. Buckets take the
// upper bits and the hash tables the lower half, so that the one does not spoil the other.
uint64_t mix(uint64_t slot) {
    const uint64_t product = (slot ^ (slot >> 32)) * 0x9e3779b97f4a7c15u;
    return product ^ (product >> 29);
}

struct Keys {
    const uint64_t* data;
    int64_t count;
    int entry_bits;
};

// How often a lookup may meet another slot, on average, before the table is given up. Slots that
// are chosen to collide would otherwise take time in the square of their number.
constexpr int64_t most_collisions = 16;

// `table` holds, for each slot met so far, one more than the place of its latest key. Returns false
// where the slots collide too often; then the links are as good as not written.
template <class Place>
bool link_keys(const Keys& keys, Place* table, int64_t capacity, Link* links) {
    std::fill(table, table + capacity, Place(0));
    const uint64_t* const data = keys.data;
    const int entry_bits = keys.entry_bits;
    const uint64_t entry_mask = (uint64_t(1) << entry_bits) - 1;
    int64_t collisions_left = most_collisions * (keys.count + 64);
    for (int64_t i = 0; i < keys.count; ++i) {
        const uint64_t key = data[i];
        const uint64_t hash = mix(key >> entry_bits) & 0xffffffffu;
        uint64_t place = hash * uint64_t(capacity) >> 32;
        while (table[place] && (data[table[place] - 1] ^ key) >> entry_bits) {
            if (++place == uint64_t(capacity)) place = 0;
            if (--collisions_left < 0) return false;
        }
        if (table[place]) {
            const Link entry = Link(key & entry_mask);
            // The one before ends the chain so far; it keeps its mark if it has one.
            links[data[table[place] - 1] & entry_mask] += entry - chain_end;
            links[entry] = chain_end | taken;
        }
        table[place] = Place(i + 1);
    }
    return true;
}

// The same by sorting: slower, whatever the slots.
void link_sorted(uint64_t* keys, int64_t count, int entry_bits, Link* links) {
    const uint64_t entry_mask = (uint64_t(1) << entry_bits) - 1;
    std::sort(keys, keys + count);  // by slot, then in order of appearance
    for (int64_t i = 0; i < count; ++i) {
        const bool first = i == 0 || (keys[i] ^ keys[i - 1]) >> entry_bits;
        const bool last = i + 1 == count || (keys[i] ^ keys[i + 1]) >> entry_bits;
        const Link next = last ? chain_end : Link(keys[i + 1] & entry_mask);
        links[keys[i] & entry_mask] = first ? next : next | taken;
    }
}

}  // namespace

Unique::Unique(const Job& job)
    : positions_(job.positions),
      entries_(job.entries),
      slots_(job.slots),
      chunk_size_(chunk_size_for(job.entries)),
      chunks_(job.whole ? 0 : (job.entries + chunk_size_ - 1) / chunk_size_),
      keys_count_(job.entries),
      marks_slots_(chunks_ == 1 && job.slots <= most_slots_per_entry * job.entries),
      entry_bits_(bits_for(job.entries)),
      slot_bits_(bits_for(job.slots)),
      bucket_bits_(marks_slots_ ? 0
                                : std::min(bits_for(job.entries / bucket_size), max_bucket_bits)),
      inspections_(size_t(chunks_)) {
    if (!job.whole && (job.entries >= int64_t(chain_end) || entry_bits_ + slot_bits_ > 64)) {
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
    return 2 * entries_ + counts + (entries_ + 1) / 2 + 2 * words_of_bits();
}

void Unique::use_scratch(uint64_t* scratch) {
    keys_ = scratch;
    tables_ = keys_ + entries_;
    links_ = reinterpret_cast<Link*>(tables_ + entries_);
    counts_ = tables_ + entries_ + (entries_ + 1) / 2;
    bits_ = counts_;  // there are no buckets to count, then
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
    std::fill(links_ + begin, links_ + end, chain_end);
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
    return bucket == 0 ? 0 : keys_count_;
}

// Makes keys of the entries whose slot comes more than once, and tells how many. No branch depends
// on the slots: it would be a guess.
int64_t Unique::collect_repeated() {
    const int64_t words = words_of_bits();
    uint64_t *const seen = bits_, *const repeated = bits_ + words, *const keys = keys_;
    const int64_t* const positions = positions_;
    std::fill(seen, seen + 2 * words, 0);
    uint64_t any = 0;
    for (int64_t i = 0; i < entries_; ++i) {
        const uint64_t slot = uint64_t(positions[i]), bit = uint64_t(1) << (slot & 63);
        const uint64_t before = seen[slot >> 6] & bit;
        any |= before;
        repeated[slot >> 6] |= before;
        seen[slot >> 6] |= bit;
    }
    if (!any) return 0;
    int64_t count = 0;
    for (int64_t i = 0; i < entries_; ++i) {
        const uint64_t slot = uint64_t(positions[i]);
        keys[count] = slot << entry_bits_ | uint64_t(i);
        count += int64_t(repeated[slot >> 6] >> (slot & 63) & 1);
    }
    return count;
}

void Unique::link(int64_t bucket) {
    const int64_t begin = bucket_begin(bucket);
    int64_t count = bucket_begin(bucket + 1) - begin;
    if (!has_buckets()) std::fill(links_, links_ + entries_, chain_end);
    if (marks_slots_) {
        count = keys_count_ = collect_repeated();
    } else if (!has_buckets()) {
        for (int64_t i = 0; i < entries_; ++i) {
            keys_[i] = uint64_t(positions_[i]) << entry_bits_ | uint64_t(i);
        }
    }
    const Keys keys{keys_ + begin, count, entry_bits_};
    bool linked;
    if (count <= bucket_size + bucket_size / 2) {
        // Sparsely filled, most lookups succeed at once: a wrong guess costs more than the memory.
        uint16_t table[8 * (bucket_size + bucket_size / 2)];
        linked = link_keys(keys, table, 8 * count, links_);
    } else {
        uint32_t* const table = reinterpret_cast<uint32_t*>(tables_ + begin);
        linked = link_keys(keys, table, 2 * count, links_);
    }
    if (!linked) link_sorted(keys_ + begin, count, entry_bits_, links_);
}

std::vector<int64_t> Unique::take_heavy(int64_t length) {
    std::vector<int64_t> found;
    for (int64_t bucket = 0; bucket < buckets(); ++bucket) {
        const uint64_t* const keys = keys_ + bucket_begin(bucket);
        const uint64_t* const end = keys_ + bucket_begin(bucket + 1);
        if (end - keys < length) continue;
        // The slot that has more than half of the bucket, if there is one, wins every such vote.
        uint64_t candidate = 0;
        int64_t votes = 0;
        for (const uint64_t* key = keys; key != end; ++key) {
            if (votes == 0) candidate = *key >> entry_bits_;
            votes += *key >> entry_bits_ == candidate ? 1 : -1;
        }
        const auto is_candidate = [&](uint64_t key) { return key >> entry_bits_ == candidate; };
        if (std::count_if(keys, end, is_candidate) < length) continue;
        found.push_back(entry_of(*std::find_if(keys, end, is_candidate)));
        links_[found.back()] |= taken;
    }
    return found;
}

}  // namespace sparsestep
