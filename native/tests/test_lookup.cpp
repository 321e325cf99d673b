// Lookups against the plainest loop, with bags of any kind and bad ids and starts.
#include <algorithm>
#include <string>

#include "core/lookup.h"
#include "testing.h"

namespace sparsestep::testing {
namespace {

constexpr int64_t rows = 40;

struct Bags {
    std::vector<int64_t> ids, starts;
    std::vector<int32_t> short_ids;
    std::vector<float> table, factors, output;
    std::vector<int64_t> indices, value_index, winners, counted;
    LookupWork work{};
    int64_t stride;

    // Rows lie apart, or not.
    Bags(int64_t bags, int64_t columns, Pooling pooling, int64_t padding, bool is_short,
         bool has_end)
        : starts{0}, stride(columns + columns % 16) {
        for (int64_t bag = 0; bag < bags; ++bag) starts.push_back(starts.back() + bag % 7);
        ids = random_indices(starts.back(), rows, unsigned(bags + columns));
        short_ids.assign(ids.begin(), ids.end());
        for (int64_t i = 0; i < rows * stride; ++i) table.push_back(0.37f * float(i % 101) - 9);
        for (size_t i = 0; i < ids.size(); ++i) factors.push_back(0.1f * float(i % 13) - 0.5f);
        output.assign(size_t(bags * columns), -1);
        indices.assign(ids.size(), -1);
        value_index = indices;
        winners.assign(output.size(), -1);
        counted.assign(size_t(bags), -1);
        work.table = table.data();
        work.dtype = Dtype::float32;
        work.rows = rows;
        work.columns = columns;
        work.row_stride = stride;
        work.ids = {is_short ? static_cast<void*>(short_ids.data()) : ids.data(), is_short};
        work.id_count = int64_t(ids.size());
        work.starts = {starts.data(), false};
        work.start_count = bags + has_end;
        work.bags = bags;
        work.pooling = pooling;
        work.padding = padding;
        work.output = output.data();
        work.indices = indices.data();
        work.value_index = value_index.data();
        work.winners = pooling == Pooling::max ? winners.data() : nullptr;
        work.counted = counted.data();
    }

    int64_t run(const Lookup lookup, int threads) {
        int64_t found = -1;
        return look_up(&work, 1, lookup, threads, &found) ? found : -1;
    }

    // What bag `bag` has in column `column`.
    float expected(int64_t bag, int64_t column) const {
        float total = 0;
        int64_t count = 0;
        for (int64_t i = starts[size_t(bag)]; i < starts[size_t(bag) + 1]; ++i) {
            const int64_t id = ids[size_t(i)];
            if (id == work.padding) continue;
            const float value = table[size_t(id * stride + column)];
            if (work.pooling == Pooling::max) {
                total = count ? std::max(total, value) : value;
            } else if (work.factors && work.padding < 0) {
                total = __builtin_fmaf(value, factors[size_t(i)], total);
            } else {
                total += work.factors ? value * factors[size_t(i)] : value;
            }
            ++count;
        }
        return work.pooling == Pooling::mean && count ? total / float(count) : total;
    }
};

void test_pooling(const Lookup lookup, int64_t bags, int64_t columns, int64_t padding,
                  int threads) {
    for (Pooling pooling : {Pooling::sum, Pooling::mean, Pooling::max}) {
        for (bool has_factors : {false, true}) {
            if (has_factors && pooling != Pooling::sum) continue;
            Bags made(bags, columns, pooling, padding, columns % 2 == 0, threads > 1);
            if (has_factors) made.work.factors = made.factors.data();
            const int64_t found = made.run(lookup, threads);
            bool right = true;
            int64_t at = 0;
            for (int64_t bag = 0; bag < bags; ++bag) {
                int64_t count = 0;
                for (int64_t i = made.starts[size_t(bag)]; i < made.starts[size_t(bag) + 1]; ++i) {
                    if (made.ids[size_t(i)] == padding) continue;
                    right &= made.indices[size_t(at)] == made.ids[size_t(i)];
                    right &= made.value_index[size_t(at)] == bag;
                    ++at, ++count;
                }
                right &= made.counted[size_t(bag)] == count;
                for (int64_t c = 0; c < columns; ++c) {
                    const size_t element = size_t(bag * columns + c);
                    right &= made.output[element] == made.expected(bag, c);
                    if (pooling != Pooling::max || !count) continue;
                    const int64_t whose = made.winners[element];
                    right &= made.table[size_t(whose * made.stride + c)] == made.output[element];
                }
            }
            check(right && found == at, "lookup of " + std::to_string(bags) + " bags, columns " +
                                            std::to_string(columns) + ", threads " +
                                            std::to_string(threads));
        }
    }
}

void test_rows(const Lookup lookup, int threads) {
    Bags made(3000, 20, Pooling::none, 3, false, false);
    made.work.starts = {};
    made.work.length = 1;
    made.work.bags = made.work.id_count;
    made.output.assign(size_t(made.work.bags * 20), -1);
    made.work.output = made.output.data();
    made.work.counted = nullptr;
    const int64_t found = made.run(lookup, threads);
    bool right = found == made.work.id_count - std::count(made.ids.begin(), made.ids.end(), 3);
    for (size_t i = 0; i < made.ids.size(); ++i) {
        for (size_t c = 0; c < 20; ++c) {
            right &= made.output[i * 20 + c] == made.table[size_t(made.ids[i] * made.stride) + c];
        }
    }
    for (int64_t i = 0; i < found; ++i) {
        right &= made.ids[size_t(made.value_index[size_t(i)])] == made.indices[size_t(i)];
    }
    check(right, "lookup of rows");
}

void test_refusals(const Lookup lookup, int threads) {
    const auto run = [&](auto spoil, bool has_end) {
        Bags made(2000, 16, Pooling::sum, -1, false, has_end);
        spoil(made);
        return made.run(lookup, threads);
    };
    for (bool has_end : {false, true}) {
        check(run([](Bags&) {}, has_end) >= 0, "what is right is done");
        check(run([](Bags& b) { b.ids[70] = -1; }, has_end) < 0, "an id below zero");
        check(run([](Bags& b) { b.ids.back() = rows; }, has_end) < 0, "an id that is no row");
        check(run([](Bags& b) { b.ids[0] = INT64_MIN; }, has_end) < 0, "the least id");
        check(run([](Bags& b) { b.starts[0] = 1; }, has_end) < 0, "a first start");
        check(run([](Bags& b) { b.starts[9] = -4; }, has_end) < 0, "a start below zero");
        check(run([](Bags& b) { b.starts[1000] = 1 << 20; }, has_end) < 0, "a start beyond");
        check(run([](Bags& b) { b.starts[1999] -= 400; }, has_end) < 0, "starts that fall");
    }
    check(run([](Bags& b) { b.starts.back() -= 1; }, true) < 0, "an end that is none");
}

}  // namespace

void test_lookup() {
    for_each_set([](const InstructionSet& set) {
        const Lookup lookup = set.lookup;
        for (int threads : {1, 3}) {
            test_rows(lookup, threads);
            test_refusals(lookup, threads);
            for (int64_t padding : {-1, 5}) {
                for (int64_t columns : {1, 16, 24, 64, 700}) {
                    if (threads_only && (threads == 1 || columns != 24)) continue;
                    for (int64_t bags : {1, 5, 1500}) {
                        test_pooling(lookup, bags, columns, padding, threads);
                    }
                }
            }
        }
    });
}

}  // namespace sparsestep::testing
