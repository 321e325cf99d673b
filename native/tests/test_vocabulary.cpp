// Ids and their rows, against the plainest model of them.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <new>
#include <string>

#include "core/vocabulary.h"
#include "testing.h"

// How many more allocations of this thread succeed; negative: all.
static thread_local int64_t allocations_left = -1;

// All forms of them: sanitizers replace each by itself. Not inlined, or the compiler sees memory of
// one kind given back as another.
#define REPLACED __attribute__((noinline))

static void* allocated(size_t size) noexcept {
    if (allocations_left == 0) return nullptr;
    if (allocations_left > 0) --allocations_left;
    return std::malloc(size ? size : 1);
}
REPLACED void* operator new(size_t size) {
    if (void* const found = allocated(size)) return found;
    throw std::bad_alloc();
}
REPLACED void* operator new[](size_t size) { return operator new(size); }
REPLACED void* operator new(size_t size, const std::nothrow_t&) noexcept { return allocated(size); }
REPLACED void* operator new[](size_t size, const std::nothrow_t&) noexcept {
    return allocated(size);
}
REPLACED void operator delete(void* memory) noexcept { std::free(memory); }
REPLACED void operator delete(void* memory, size_t) noexcept { std::free(memory); }
REPLACED void operator delete[](void* memory) noexcept { std::free(memory); }
REPLACED void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace sparsestep::testing {
namespace {

struct Model {
    struct Row {
        int64_t id, count, seen;
    };
    VocabularyOptions options;
    std::map<int64_t, int64_t> row_of;
    std::map<int64_t, Row> rows;
    std::vector<std::pair<int64_t, int64_t>> candidates;  // id, count; the one seen last at the end
    int64_t used, sightings = 0;

    explicit Model(const VocabularyOptions& given) : options(given), used(given.shared) {}

    int64_t free_row(int64_t now) {
        if (used < options.rows) return used++;
        if (options.eviction == Eviction::none) return -1;
        int64_t found = -1;
        std::pair<int64_t, int64_t> least;
        for (const auto& [row, it] : rows) {
            const bool lfu = options.eviction == Eviction::lfu;
            const std::pair<int64_t, int64_t> key{lfu ? it.count : 0, it.seen};
            if (it.seen != now && (found < 0 || key < least)) found = row, least = key;
        }
        if (found >= 0) row_of.erase(rows[found].id);
        return found;
    }

    void see(const std::vector<int64_t>& ids, int64_t now) {
        std::vector<std::pair<int64_t, int64_t>> unknown;
        for (int64_t id : ids) {
            if (row_of.count(id)) {
                Row& row = rows[row_of[id]];
                ++row.count;
                row.seen = now;
                continue;
            }
            auto it = std::find_if(unknown.begin(), unknown.end(),
                                   [&](const auto& each) { return each.first == id; });
            if (it == unknown.end()) it = unknown.insert(it, {id, 0});
            ++it->second;
        }
        size_t of_this_batch = 0;
        for (auto [id, count] : unknown) {
            const auto known =
                std::find_if(candidates.begin(), candidates.end(),
                             [id = id](const auto& each) { return each.first == id; });
            const bool was_known = known != candidates.end();
            if (was_known) count += known->second;
            const int64_t row = count < options.admit ? -1 : free_row(now);
            if (row >= 0) {
                if (was_known) candidates.erase(known);
                rows[row] = {id, count, now};
                row_of[id] = row;
                continue;
            }
            if (was_known) candidates.erase(known);
            if (!was_known && int64_t(candidates.size()) == options.candidates) {
                if (of_this_batch >= candidates.size()) continue;
                candidates.erase(candidates.begin());
            }
            candidates.push_back({id, count});
            ++of_this_batch;
        }
        sightings += int64_t(ids.size());
        if (options.eviction == Eviction::lfu && sightings >= options.fades_after) {
            for (auto& [row, it] : rows) it.count /= 2;
            sightings = 0;
        }
    }
};

using Contents = std::vector<std::vector<int64_t>>;

Contents contents_of(const Vocabulary& vocabulary, const VocabularyOptions& options) {
    Contents found(5, std::vector<int64_t>(size_t(options.rows)));
    vocabulary.save(
        {found[0].data(), found[1].data(), found[2].data(), found[3].data(), found[4].data()});
    const VocabularySizes sizes = vocabulary.sizes();
    found.push_back({sizes.used, sizes.candidates, sizes.sightings});
    return found;
}

void test_against_model(const VocabularyOptions& options, int64_t ids, int64_t steps,
                        unsigned seed) {
    const std::string what = std::to_string(options.rows) + " rows, admit " +
                             std::to_string(options.admit) + ", eviction " +
                             std::to_string(int(options.eviction));
    Vocabulary vocabulary(options);
    Model model(options);
    std::mt19937_64 random(seed);
    bool right = true;
    int64_t now = 1;
    for (int64_t step = 0; step < steps; ++step) {
        std::vector<int64_t> batch(random() % 12);
        for (int64_t& id : batch) id = int64_t((random() % uint64_t(ids)) * 0x9e3779b97f4a7c15);
        std::vector<int64_t> found(batch.size()), taken(batch.size());
        vocabulary.find(batch.data(), int64_t(batch.size()), found.data(), 2);
        for (size_t i = 0; i < batch.size(); ++i) {
            const auto it = model.row_of.find(batch[i]);
            right &= it == model.row_of.end() ? found[i] < options.shared : found[i] == it->second;
        }
        const int64_t size = int64_t(batch.size());
        const auto claim = [&](std::vector<int64_t>& to) {
            return vocabulary.claim(batch.data(), size, now, to.data(), taken.data(), 2);
        };
        if (random() % 4 == 0) {  // and then it is undone
            std::vector<int64_t> provisional(batch.size());
            const auto was = contents_of(vocabulary, options);
            for (int64_t at = now; at < now + 2; ++at) {
                vocabulary.claim(batch.data(), size, at, provisional.data(), taken.data(), 2);
            }
            vocabulary.rollback();
            right &= was == contents_of(vocabulary, options);
            vocabulary.find(batch.data(), size, provisional.data(), 2);
            right &= provisional == found;
        }
        if (random() % 8 == 0) {  // memory runs out in one allocation after the other
            const auto was = contents_of(vocabulary, options);
            for (int64_t failing = 0;; ++failing) {
                bool is_whole = true;
                allocations_left = failing;
                try {
                    claim(found);
                } catch (const std::bad_alloc&) {
                    is_whole = false;
                }
                allocations_left = -1;
                if (is_whole) break;
                right &= was == contents_of(vocabulary, options);
            }
        } else {
            claim(found);
        }
        allocations_left = 0;  // commit must not allocate
        vocabulary.commit();
        allocations_left = -1;
        model.see(batch, now);
        for (size_t i = 0; i < batch.size(); ++i) {
            const auto it = model.row_of.find(batch[i]);
            right &= it == model.row_of.end() ? found[i] < options.shared : found[i] == it->second;
        }
        now += random() % 3 != 0;
        if (step % 500 == 499) {  // it goes on from what was saved
            std::vector<int64_t> a(size_t(options.rows)), b = a, c = a, d = a, e = a;
            const VocabularyArrays arrays{a.data(), b.data(), c.data(), d.data(), e.data()};
            vocabulary.save(arrays);
            Vocabulary other(options);
            right &= other.load(arrays, vocabulary.sizes(), now);
            vocabulary = std::move(other);
            if (vocabulary.sizes().used > options.shared + 1) {  // an id comes twice
                const auto was = contents_of(vocabulary, options);
                a[size_t(options.shared)] = a[size_t(options.shared) + 1];
                right &= !vocabulary.load(arrays, vocabulary.sizes(), now);
                right &= was == contents_of(vocabulary, options);
            }
        }
    }
    check(right, "vocabulary: " + what);
}

}  // namespace

void test_vocabulary() {
    const int64_t steps = threads_only ? 50 : 3000;
    for (Eviction eviction : {Eviction::none, Eviction::lru, Eviction::lfu}) {
        for (int64_t admit : {1, 2, 5}) {
            for (int64_t rows : {2, 9, 150}) {
                const int64_t candidates = admit > 1 ? rows - 1 : 0;
                test_against_model({rows, 1, admit, candidates, eviction, 16 * rows, {12345, 6789}},
                                   2 * rows, steps, unsigned(rows + admit));
            }
        }
        test_against_model({6000, 3, 1, 0, eviction, 96000, {1, 3}}, 9000, steps, 7);
    }
}

}  // namespace sparsestep::testing
