// Which ids go to which process. Row i belongs to process i % world, which calls it i / world.
#pragma once

#include <cstdint>
#include <vector>

#include "core/scratch.h"
#include "core/types.h"
#include "core/unique.h"

namespace sparsestep {

// Bags of ids: those of bag b are [starts[b], starts[b + 1]). Without starts, one id each.
struct IdBags {
    const int64_t* ids;
    int64_t entries;
    const int64_t* starts;  // null: none
    int64_t count;
};

// Where the ids of each owner go, all in their order: the owner's number of the row, the entry it
// was, and for each bag of which the owner has a part, the bag and how many of its ids.
template <class Row>
struct OwnerParts {
    Row* rows;
    int64_t* order;  // null: not asked for
    int64_t* bags;   // null: not asked for, nor lengths
    int64_t* lengths;
    std::vector<int64_t> ids_of, bags_of;  // how many, of each owner
};

template <class Visit>
void for_each_id(const IdBags& from, const Visit& visit) {
    if (!from.starts) {
        for (int64_t e = 0; e < from.entries; ++e) visit(e, e);
        return;
    }
    for (int64_t bag = 0; bag < from.count; ++bag) {
        for (int64_t e = from.starts[bag]; e < from.starts[bag + 1]; ++e) visit(bag, e);
    }
}

template <class Row>
void split_by_owner(const IdBags& from, uint64_t world, OwnerParts<Row>& to) {
    // Dividing 32 bits takes half as long; most tables have fewer rows.
    const auto owner_of = [world](uint64_t id) {
        return id >> 32 ? id % world : uint64_t(uint32_t(id) % uint32_t(world));
    };
    const auto row_of = [world](uint64_t id) {
        return id >> 32 ? id / world : uint64_t(uint32_t(id) / uint32_t(world));
    };
    to.ids_of.assign(size_t(world), 0);
    to.bags_of.assign(size_t(world), 0);
    std::vector<int64_t> latest(size_t(world), -1);
    for_each_id(from, [&](int64_t bag, int64_t e) {
        const size_t owner = size_t(owner_of(uint64_t(from.ids[e])));
        ++to.ids_of[owner];
        to.bags_of[owner] += latest[owner] != bag;
        latest[owner] = bag;
    });
    std::vector<int64_t> at(size_t(world), 0), part(size_t(world), 0);
    for (size_t owner = 1; owner < size_t(world); ++owner) {
        at[owner] = at[owner - 1] + to.ids_of[owner - 1];
        part[owner] = part[owner - 1] + to.bags_of[owner - 1];
    }
    latest.assign(size_t(world), -1);
    for_each_id(from, [&](int64_t bag, int64_t e) {
        const uint64_t id = uint64_t(from.ids[e]);
        const size_t owner = size_t(owner_of(id));
        if (to.bags) {
            if (latest[owner] != bag) {
                latest[owner] = bag;
                to.bags[part[owner]] = bag;
                to.lengths[part[owner]++] = 0;
            }
            ++to.lengths[part[owner] - 1];
        }
        if (to.order) to.order[at[owner]] = e;
        to.rows[at[owner]++] = Row(row_of(id));
    });
}

// The distinct ids in order of appearance, and for each entry which of them it is. Returns how many
// they are; -1 where one is not below `rows`.
inline int64_t find_distinct(const int64_t* ids, int64_t entries, int64_t rows, int64_t* distinct,
                             int64_t* which) {
    Job job{};
    job.positions = ids;
    job.entries = entries;
    job.slots = rows;
    Unique unique(job);
    for (int64_t chunk = 0; chunk < unique.chunks(); ++chunk) unique.inspect(chunk);
    if (unique.first_bad_entry() >= 0) return -1;
    for (int64_t e = 0; e < entries; ++e) which[e] = e;
    Scratch scratch;
    if (!unique.ascending()) {
        scratch.reserve(size_t(unique.scratch_words()) * sizeof(uint64_t));
        unique.use_scratch(static_cast<uint64_t*>(scratch.data()));
        if (unique.has_buckets()) {
            for (int64_t chunk = 0; chunk < unique.chunks(); ++chunk) unique.count(chunk);
            unique.place_buckets();
            for (int64_t chunk = 0; chunk < unique.chunks(); ++chunk) unique.scatter(chunk);
        }
        for (int64_t bucket = 0; bucket < unique.buckets(); ++bucket) {
            unique.group(bucket);
            const Unique::Range range = unique.range(bucket);
            for (int64_t g = range.begin; g < range.end; ++g) {
                const Entry* const members = unique.members() + unique.groups()[g].begin;
                for (Entry i = 1; i < unique.groups()[g].count; ++i) which[members[i]] = *members;
            }
        }
    }
    // So far each entry has the number of the first one that is like it.
    int64_t count = 0;
    for (int64_t e = 0; e < entries; ++e) {
        if (which[e] == e) {
            distinct[count] = ids[e];
            which[e] = count++;
        } else {
            which[e] = which[which[e]];
        }
    }
    return count;
}

}  // namespace sparsestep
