// Ids for the processes that own their rows, against what each of them must get.
#include <algorithm>
#include <string>

#include "core/round_robin.h"
#include "testing.h"

namespace sparsestep::testing {
namespace {

void test_split(int64_t bags, int64_t world, unsigned seed) {
    const std::string what = std::to_string(bags) + " bags, " + std::to_string(world) + " owners";
    std::vector<int64_t> starts{0};
    for (int64_t bag = 0; bag < bags; ++bag) starts.push_back(starts.back() + bag % 4);
    const int64_t entries = starts.back();
    const std::vector<int64_t> ids = random_indices(entries, 50, seed);
    std::vector<int32_t> rows(size_t(entries), -1);
    std::vector<int64_t> order(size_t(entries), -1), which = order;
    std::vector<int32_t> lengths = rows;
    RankParts<int32_t> parts{rows.data(), order.data(), which.data(), lengths.data(), {}, {}};
    split_by_owner({ids.data(), entries, starts.data(), bags}, uint64_t(world), parts);
    size_t at = 0, part = 0;
    bool right = true;
    for (int64_t owner = 0; owner < world; ++owner) {
        const size_t first = at, first_part = part;
        for (int64_t bag = 0; bag < bags; ++bag) {
            const size_t before = at;
            for (int64_t e = starts[size_t(bag)]; e < starts[size_t(bag) + 1]; ++e) {
                if (ids[size_t(e)] % world != owner) continue;
                right &= order[at] == e && rows[at] == ids[size_t(e)] / world;
                ++at;
            }
            if (at == before) continue;
            right &= which[part] == bag && lengths[part] == int64_t(at - before);
            ++part;
        }
        right &= parts.ids_of[size_t(owner)] == int64_t(at - first);
        right &= parts.bags_of[size_t(owner)] == int64_t(part - first_part);
    }
    check(right && int64_t(at) == entries, what);
    // The same with a part of every bag for every owner.
    std::vector<int32_t> all(size_t(bags * world), -1), again(size_t(entries), -1);
    RankParts<int32_t> whole{again.data(), nullptr, nullptr, all.data(), {}, {}};
    split_by_owner({ids.data(), entries, starts.data(), bags}, uint64_t(world), whole);
    bool same = again == rows && whole.ids_of == parts.ids_of;
    part = 0;
    for (int64_t owner = 0, left = 0; owner < world; ++owner) {
        left = parts.bags_of[size_t(owner)];
        for (int64_t bag = 0; bag < bags; ++bag) {
            const bool has_part = left > 0 && which[part] == bag;
            same &= all[size_t(owner * bags + bag)] == (has_part ? lengths[part] : 0);
            part += has_part;
            left -= has_part;
        }
        same &= whole.bags_of[size_t(owner)] == bags;
    }
    check(same, what + ", all parts");
}

void test_distinct(int64_t entries, int64_t rows, unsigned seed) {
    const std::string what = std::to_string(entries) + " of " + std::to_string(rows) + " ids";
    std::vector<int64_t> ids = random_indices(entries, rows, seed);
    std::vector<int64_t> distinct(ids.size()), which(ids.size());
    const auto find = [&](int64_t below) {
        return find_unique(ids.data(), entries, below, distinct.data(), which.data());
    };
    const int64_t count = find(rows);
    bool right = true;
    for (size_t i = 0; i < ids.size(); ++i) right &= distinct[size_t(which[i])] == ids[i];
    std::vector<int64_t> sorted = ids;
    std::sort(sorted.begin(), sorted.end());
    const auto end = std::unique(sorted.begin(), sorted.end());
    check(right && count == end - sorted.begin(), "distinct: " + what);
    ids[ids.size() / 2] = rows;
    check(find(rows) == -1, "an id that is no row: " + what);
}

}  // namespace

void test_round_robin() {
    for (int64_t world : {1, 2, 3, 64}) {
        for (int64_t bags : {0, 1, 300}) test_split(bags, world, unsigned(bags + world));
    }
    test_distinct(100, 40, 1);
    test_distinct(9000, 1000, 2);
    test_distinct(50000, 1 << 20, 3);
}

}  // namespace sparsestep::testing
