// From the keys of one bucket to groups; see unique.h for what they are.
//
// Included by unique.cpp alone; everything has internal linkage.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/types.h"

namespace sparsestep {
namespace {

// Spreads neighbouring slots, and slots at regular distances, over all 64 bits. Buckets take the
// upper bits and the hash tables the lower half, so that the one does not spoil the other.
uint64_t mix(uint64_t slot) {
    const uint64_t product = (slot ^ (slot >> 32)) * 0x9e3779b97f4a7c15u;
    return product ^ (product >> 29);
}

// How often a lookup may meet another slot, on average, before the table is given up. Slots that
// are chosen to collide would otherwise take time in the square of their number.
constexpr int64_t most_collisions = 16;

// What a key becomes once its slot has a number: that in the upper half, the entry in the lower.
constexpr int number_shift = 32;
constexpr uint64_t entry_mask = (uint64_t(1) << number_shift) - 1;

// Of the numbers bit_of(begin) to bit_of(end - 1), marks which have been seen, and which again.
// Returns how often one came again. No branch depends on the numbers: it would be a guess.
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

// Leaves out keys whose slot comes once, as far as 16 bits of a hash can tell, unless the first few
// keys say that these are not most: then it would cost more than it saves. Returns how many are
// left.
int64_t drop_alone(uint64_t* keys, int64_t count, int entry_bits) {
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

// Keys, and what is found out about their slots, which are numbered from 1. Number is as short as
// it can be, so that all of it stays in the cache.
template <class Number>
struct Grouping {
    uint64_t* keys;
    int64_t count;
    int entry_bits;
    Number* table;  // for a hash of the slot its number
    int64_t capacity;
    int64_t* slots;
    Number *counts, *ends;  // of each slot: how many keys, and where they end
    int64_t last = 0;       // number
};

// Puts the number of its slot into each key. Returns false where the slots collide too often; then
// the keys are as they were. No branch depends on whether a slot is new: it would be a guess.
template <class Number>
bool number_by_hash(Grouping<Number>& work) {
    std::fill(work.table, work.table + work.capacity, Number(0));
    uint64_t* const keys = work.keys;
    Number *const table = work.table, *const counts = work.counts;
    int64_t* const slots = work.slots;
    const int entry_bits = work.entry_bits;
    const uint64_t capacity = uint64_t(work.capacity), mask = (uint64_t(1) << entry_bits) - 1;
    int64_t collisions_left = most_collisions * (work.count + 64);
    uint64_t last = 0;
    for (int64_t i = 0; i < work.count; ++i) {
        const int64_t slot = int64_t(keys[i] >> entry_bits);
        slots[0] = slot;  // so that an empty place passes for the right one
        uint64_t place = (mix(uint64_t(slot)) & 0xffffffffu) * capacity >> 32;
        while (slots[table[place]] != slot) {
            if (++place == capacity) place = 0;
            if (--collisions_left < 0) {
                while (i-- > 0) {
                    const uint64_t before = uint64_t(slots[keys[i] >> number_shift]);
                    keys[i] = before << entry_bits | (keys[i] & entry_mask);
                }
                return false;
            }
        }
        const uint64_t found = table[place], is_new = found == 0;
        last += is_new;
        const uint64_t number = found + (last & -is_new);
        slots[number] = slot;
        counts[number] = Number((counts[number] & (is_new - 1)) + 1);
        table[place] = Number(number);
        keys[i] = number << number_shift | (keys[i] & mask);
    }
    work.last = int64_t(last);
    return true;
}

// The same by sorting: slower, whatever the slots.
template <class Number>
void number_by_sorting(Grouping<Number>& work) {
    const uint64_t mask = (uint64_t(1) << work.entry_bits) - 1;
    std::sort(work.keys, work.keys + work.count);  // by slot, then in order of appearance
    int64_t last = 0;
    for (int64_t i = 0; i < work.count; ++i) {
        const int64_t slot = int64_t(work.keys[i] >> work.entry_bits);
        if (last == 0 || work.slots[last] != slot) {
            work.slots[++last] = slot;
            work.counts[last] = 0;
        }
        ++work.counts[last];
        work.keys[i] = uint64_t(last) << number_shift | (work.keys[i] & mask);
    }
    work.last = last;
}

// Writes the groups, and their entries side by side: from members[begin] on, and behind them the
// entries that are alone. Returns how many entries are in groups; changes last to the groups'
// number.
template <class Number>
int64_t place_members(Grouping<Number>& work, EntryGroup* groups, Entry* members, int64_t begin) {
    Number *const counts = work.counts, *const ends = work.ends;
    uint64_t at = 0, alone = uint64_t(work.count);
    int64_t kept = 0;
    for (int64_t number = 1; number <= work.last; ++number) {
        const uint64_t count = counts[number], is_alone = count == 1;
        groups[kept] = {work.slots[number], Entry(uint64_t(begin) + at), Entry(count)};
        kept += int64_t(1 - is_alone);
        at += count - is_alone;
        ends[number] = Number(is_alone ? alone : at);
        alone -= is_alone;
    }
    work.last = kept;
    for (int64_t i = work.count - 1; i >= 0; --i) {
        const uint64_t key = work.keys[i];
        members[begin + int64_t(--ends[key >> number_shift])] = Entry(key & entry_mask);
    }
    return int64_t(at);
}

}  // namespace
}  // namespace sparsestep
