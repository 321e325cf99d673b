// Which ids go to which process. Row i belongs to process i % world, which calls it i / world.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/dedup.h"
#include "core/memory.h"
#include "core/types.h"

namespace sparsestep {

// Bags of ids: those of bag b are [starts[b], starts[b + 1]). Without starts, one id each.
struct IdBags {
    const int64_t* ids;
    int64_t entries;
    const int64_t* starts;  // null: none
    int64_t count;

    int64_t start(int64_t bag) const { return starts ? starts[bag] : bag; }
};

// Where the ids of each owner rank go, all in their order: the owner's number of the row, the entry
// it was, and for each bag of which the owner has a part, the bag and how many of its ids.
template <class Row>
struct RankParts {
    Row* rows;
    int64_t* order;    // null: not asked for
    int64_t* bags;     // null: not asked for; with lengths, every owner has a part of every bag
    int32_t* lengths;  // null: not asked for
    std::vector<int64_t> ids_of, bags_of;  // how many, of each owner

    bool has_all() const { return lengths && !bags; }
};

// Division by a number that is not known to the compiler. It takes several times as long as all
// else that is done for an id.
class DivideByShift {
public:
    explicit DivideByShift(uint64_t world) : mask_(world - 1) {
        while (world >> bits_ > 1) ++bits_;
    }
    static bool fits(uint64_t world) { return (world & (world - 1)) == 0; }
    uint64_t row(uint64_t id) const { return id >> bits_; }
    uint64_t owner(uint64_t id, uint64_t) const { return id & mask_; }

private:
    uint64_t mask_;
    int bits_ = 0;
};

// Of 32 bits, by the inverse in 64: the product's upper half is exact. World is below 2^32.
class DivideByMultiply {
public:
    explicit DivideByMultiply(uint64_t world) : world_(world), inverse_(UINT64_MAX / world + 1) {}
    uint64_t row(uint64_t id) const {
        if (id >> 32) return id / world_;
        return uint64_t(Wide(inverse_) * id >> 64);
    }
    uint64_t owner(uint64_t id, uint64_t row) const { return id - row * world_; }

private:
    __extension__ typedef unsigned __int128 Wide;
    uint64_t world_, inverse_;
};

template <class Row, class Divide>
class SplitByRank {
public:
    SplitByRank(const IdBags& from, uint64_t world, RankParts<Row>& to)
        : from_(from), to_(to), world_(size_t(world)), divide_(world) {}

    void run() {
        to_.ids_of.assign(world_, 0);
        to_.bags_of.assign(world_, to_.has_all() ? from_.count : 0);
        latest_.assign(world_, -1);
        if (to_.has_all()) {
            part_ = begins(to_.bags_of);
            if (!to_.order && int64_t(world_) * from_.entries <= most_room) return write_at_once();
            for_each_id([&](int64_t, int64_t, uint64_t, size_t owner) { ++to_.ids_of[owner]; });
        } else {
            for_each_id([&](int64_t bag, int64_t, uint64_t, size_t owner) {
                ++to_.ids_of[owner];
                to_.bags_of[owner] += latest_[owner] != bag;
                latest_[owner] = bag;
            });
        }
        at_ = begins(to_.ids_of);
        part_ = begins(to_.bags_of);
        if (to_.has_all()) {
            write_all(to_.rows);
        } else {
            write_parts();
        }
    }

private:
    template <class Visit>
    void for_each_id(int64_t bag, const Visit& visit) const {
        const int64_t end = from_.start(bag + 1);
        for (int64_t e = from_.start(bag); e < end; ++e) {
            const uint64_t id = uint64_t(from_.ids[e]), row = divide_.row(id);
            visit(bag, e, row, size_t(divide_.owner(id, row)));
        }
    }
    template <class Visit>
    void for_each_id(const Visit& visit) const {
        for (int64_t bag = 0; bag < from_.count; ++bag) for_each_id(bag, visit);
    }

    std::vector<int64_t> begins(const std::vector<int64_t>& counts) const {
        std::vector<int64_t> found(world_, 0);
        for (size_t owner = 1; owner < world_; ++owner) {
            found[owner] = found[owner - 1] + counts[owner - 1];
        }
        return found;
    }

    void write(int64_t e, uint64_t row, size_t owner, Row* rows) {
        if (to_.order) to_.order[at_[owner]] = e;
        rows[at_[owner]++] = Row(row);
    }

    // Without counting first: every owner has room for all ids. Then they are moved together.
    void write_at_once() {
        Scratch scratch;
        scratch.reserve(world_ * size_t(from_.entries) * sizeof(Row) + 1);
        Row *const room = static_cast<Row*>(scratch.data()), *to = to_.rows;
        at_ = begins(std::vector<int64_t>(world_, from_.entries));
        const std::vector<int64_t> first = at_;
        write_all(room);
        for (size_t owner = 0; owner < world_; ++owner) {
            to_.ids_of[owner] = at_[owner] - first[owner];
            to = std::copy_n(room + first[owner], to_.ids_of[owner], to);
        }
    }

    void write_all(Row* rows) {
        std::vector<int64_t> before = at_;
        for (int64_t bag = 0; bag < from_.count; ++bag) {
            for_each_id(bag, [&](int64_t, int64_t e, uint64_t row, size_t owner) {
                write(e, row, owner, rows);
            });
            for (size_t owner = 0; owner < world_; ++owner) {
                to_.lengths[part_[owner]++] = int32_t(at_[owner] - before[owner]);
                before[owner] = at_[owner];
            }
        }
    }

    void write_parts() {
        latest_.assign(world_, -1);
        for_each_id([&](int64_t bag, int64_t e, uint64_t row, size_t owner) {
            if (to_.bags) {
                if (latest_[owner] != bag) {
                    latest_[owner] = bag;
                    to_.bags[part_[owner]] = bag;
                    to_.lengths[part_[owner]++] = 0;
                }
                ++to_.lengths[part_[owner] - 1];
            }
            write(e, row, owner, to_.rows);
        });
    }

    static constexpr int64_t most_room = int64_t(1) << 20;  // numbers

    const IdBags& from_;
    RankParts<Row>& to_;
    const size_t world_;
    const Divide divide_;
    std::vector<int64_t> at_, part_, latest_;  // by owner: the next id, the next part, the last bag
};

template <class Row>
void split_by_owner(const IdBags& from, uint64_t world, RankParts<Row>& to) {
    if (DivideByShift::fits(world)) {
        SplitByRank<Row, DivideByShift>(from, world, to).run();
    } else {
        SplitByRank<Row, DivideByMultiply>(from, world, to).run();
    }
}

// The distinct ids in order of appearance, and for each entry the number of its id. Returns the
// count of distinct ids; -1 if an id is not in [0, rows).
inline int64_t find_unique(const int64_t* ids, int64_t entries, int64_t rows, int64_t* distinct,
                           int64_t* which) {
    Job job{};
    job.indices = ids;
    job.entries = entries;
    job.num_slots = rows;
    Dedup unique(job);
    for (int64_t chunk = 0; chunk < unique.chunks(); ++chunk) unique.scan(chunk);
    if (unique.first_out_of_range() >= 0) return -1;
    for (int64_t e = 0; e < entries; ++e) which[e] = e;
    Scratch scratch;
    if (!unique.ascending()) {
        scratch.reserve(size_t(unique.scratch_words()) * sizeof(uint64_t));
        unique.set_scratch(static_cast<uint64_t*>(scratch.data()));
        if (unique.has_buckets()) {
            for (int64_t chunk = 0; chunk < unique.chunks(); ++chunk) unique.count(chunk);
            unique.place_buckets();
            for (int64_t chunk = 0; chunk < unique.chunks(); ++chunk) unique.scatter(chunk);
        }
        for (int64_t bucket = 0; bucket < unique.buckets(); ++bucket) {
            unique.group(bucket);
            const Dedup::Range range = unique.range(bucket);
            for (int64_t g = range.begin; g < range.end; ++g) {
                const Entry* const duplicate_entries =
                    unique.duplicate_entries() + unique.groups()[g].begin;
                for (Entry i = 1; i < unique.groups()[g].count; ++i)
                    which[duplicate_entries[i]] = *duplicate_entries;
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
