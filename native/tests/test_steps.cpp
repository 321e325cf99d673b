// Whole steps of one rule, compared to the bit.
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/step.h"
#include "testing.h"

using namespace sparsestep;
using namespace sparsestep::testing;

namespace {

constexpr double options[] = {0.01, 0.9, 0.999, 1e-8};  // lr, betas, eps
constexpr double late = 1e9;                            // a step without bias to correct

template <class T>
void sparse_adam(T& p, T g, T& m, T& v) {
    m = m + T(1 - options[1]) * (g - m);
    v = v + T(1 - options[2]) * (g * g - v);
    p = p - T(options[0]) * (m / (std::sqrt(v) + T(options[3])));
}

template <class T>
struct Problem {
    int64_t num_slots, slot_size;
    std::vector<int64_t> indices;
    std::vector<T> values, param, exp_avg, exp_avg_sq;
    bool maximize = false;
    bool whole = false;

    Problem(int64_t num_slots, int64_t slot_size, std::vector<int64_t> indices, unsigned seed)
        : num_slots(num_slots), slot_size(slot_size), indices(std::move(indices)) {
        std::mt19937 random(seed);
        std::normal_distribution<double> normal;
        const auto fill = [&](std::vector<T>& to, size_t count) {
            for (size_t i = 0; i < count; ++i) to.push_back(T(normal(random)));
        };
        fill(values, this->indices.size() * size_t(slot_size));
        fill(param, size_t(num_slots * slot_size));
        fill(exp_avg, size_t(num_slots * slot_size));
        fill(exp_avg_sq, size_t(num_slots * slot_size));
        for (T& value : exp_avg_sq) value = value * value;
    }

    void solve_plainly() {
        std::map<int64_t, std::vector<T>> sums;
        for (size_t i = 0; i < indices.size(); ++i) {
            std::vector<T>& sum = sums[indices[i]];
            for (int64_t j = 0; j < slot_size; ++j) {
                const T value = values[i * size_t(slot_size) + size_t(j)];
                if (int64_t(sum.size()) < slot_size) {
                    sum.push_back(value);
                } else {
                    sum[size_t(j)] += value;
                }
            }
        }
        for (const auto& [slot, sum] : sums) {
            for (int64_t j = 0; j < slot_size; ++j) {
                const size_t at = size_t(slot * slot_size + j);
                const T grad = maximize ? -sum[size_t(j)] : sum[size_t(j)];
                sparse_adam(param[at], grad, exp_avg[at], exp_avg_sq[at]);
            }
        }
    }

    TensorView view(std::vector<T>& tensor) {
        return {tensor.data(), sizeof(T) == 4 ? Dtype::float32 : Dtype::float64, slot_size, 1};
    }

    Job job(const InstructionSet& set) {
        Job result{};
        result.all_slots = whole;
        result.indices = indices.data();
        result.entries = int64_t(indices.size());
        result.num_slots = num_slots;
        result.slot_size = slot_size;
        result.maximize = maximize;
        result.values = view(values);
        result.param = view(param);
        result.state[0] = view(exp_avg);
        result.state[1] = view(exp_avg_sq);
        for (int i = 0; i < 4; ++i) result.options[i] = options[i];
        result.step = late;
        result.apply = (sizeof(T) == 4 ? set.in_float : set.in_double).rules[0].apply;
        return result;
    }

    bool operator==(const Problem& other) const {
        const auto same = [](const std::vector<T>& a, const std::vector<T>& b) {
            return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
        };
        return same(param, other.param) && same(exp_avg, other.exp_avg) &&
               same(exp_avg_sq, other.exp_avg_sq);
    }
};

template <class T>
void expect_solved(const Problem<T>& problem, const std::string& what) {
    Problem<T> expected = problem;
    expected.solve_plainly();
    for_each_set([&](const InstructionSet& set) {
        for (int threads : {1, 2, 3, 8}) {
            Problem<T> ours = problem;
            Job job = ours.job(set);
            check(!step(&job, 1, threads), what + ": no bad entry");
            check(ours == expected, what + " with " + set.name + ", " + std::to_string(threads));
        }
    });
}

template <class T>
void test_shapes() {
    for (int64_t count : {0, 1, 2, 31, 64, 1000, 30000}) {
        if (threads_only && count < 1000) continue;  // one thread does them
        for (int64_t num_slots : {1, 2, 7, 1000}) {
            for (int64_t slot_size : {1, 3, 16, 37}) {
                const std::string what = std::to_string(count) + " entries, " +
                                         std::to_string(num_slots) + " x " +
                                         std::to_string(slot_size);
                const auto seed = unsigned(count + num_slots * slot_size);
                expect_solved(
                    Problem<T>(num_slots, slot_size, random_indices(count, num_slots, seed), seed),
                    what);
            }
        }
    }
}

void test_long_rows_and_maximize() {
    Problem<float> problem(20, 1300, random_indices(50, 20, 1), 1);
    problem.maximize = true;
    expect_solved(problem, "rows longer than a tile, negated");
}

void test_one_slot_has_most_entries() {
    std::vector<int64_t> indices = random_indices(60000, 5000, 2);
    for (size_t i = 0; i < indices.size(); i += 2) indices[i] = 77;
    for (size_t i = 1; i < indices.size(); i += 6) indices[i] = 78;
    expect_solved(Problem<float>(5000, 8, indices, 2), "two heavy groups");
    expect_solved(Problem<float>(5000, 40, std::vector<int64_t>(20000, 4999), 3), "one group");
}

void test_ascending_positions() {
    std::vector<int64_t> indices;
    for (int64_t i = 0; i < 40000; ++i) indices.push_back(2 * i);
    expect_solved(Problem<float>(80000, 4, indices, 4), "ascending");
    indices[20000] = indices[19999];  // a repetition where two chunks might meet
    expect_solved(Problem<float>(80000, 4, indices, 4), "ascending but for one repetition");
    std::swap(indices[8191], indices[8192]);
    expect_solved(Problem<float>(80000, 4, indices, 4), "one pair out of order between chunks");
}

void test_regular_distances() {
    std::vector<int64_t> indices;
    for (int64_t i = 0; i < 30000; ++i) indices.push_back((i * 7 % 300) * 4096);
    expect_solved(Problem<float>(300 * 4096, 1, indices, 5), "slots at regular distances");
}

void test_slots_that_are_mostly_alone() {
    const auto indices = random_indices(20000, 400000, 15);
    expect_solved(Problem<float>(400000, 2, indices, 15), "few slots come twice");
    std::vector<int64_t> late = indices;  // what is looked at first says nothing of it
    for (size_t i = 15000; i < late.size(); ++i) late[i] = late[i % 50];
    expect_solved(Problem<float>(400000, 2, late, 16), "few slots come twice, then all");
}

void test_whole_parameter() {
    Problem<float> problem(1, 100000, {0}, 6);
    problem.whole = true;
    expect_solved(problem, "whole parameter");
}

void test_rows_of_values_by_number() {
    // Every entry takes the row that it would have, from values in another order; then from values
    // that have still to be multiplied, by factors for which nothing is rounded.
    Problem<float> problem(500, 24, random_indices(3000, 500, 10), 10);
    Problem<float> expected = problem;
    expected.solve_plainly();
    std::vector<int64_t> value_index;
    std::vector<float> shuffled(problem.values.size());
    for (int64_t i = 0; i < 3000; ++i) value_index.push_back((i * 7 + 3) % 3000);
    for (size_t i = 0; i < value_index.size(); ++i) {
        std::memcpy(&shuffled[size_t(value_index[i]) * 24], &problem.values[i * 24],
                    24 * sizeof(float));
    }
    for_each_set([&](const InstructionSet& set) {
        Problem<float> ours = problem;
        ours.values = shuffled;
        Job job = ours.job(set);
        job.value_index = value_index.data();
        job.rows = int64_t(value_index.size());
        step(&job, 1, 2);
        check(ours == expected, std::string("values by number with ") + set.name);
    });
    std::vector<float> scale;
    for (size_t i = 0; i < value_index.size(); ++i) {
        scale.push_back(i % 3 == 0 ? 4.0f : -0.5f);
        for (size_t j = 0; j < 24; ++j) shuffled[size_t(value_index[i]) * 24 + j] /= scale[i];
    }
    for_each_set([&](const InstructionSet& set) {
        Problem<float> ours = problem;
        ours.values = shuffled;
        Job job = ours.job(set);
        job.value_index = value_index.data();
        job.rows = int64_t(value_index.size());
        job.scale = {scale.data(), Dtype::float32, 1, 1};
        step(&job, 1, 2);
        check(ours == expected, std::string("scaled values with ") + set.name);
    });
}

void test_values_in_several_places() {
    Problem<float> problem(500, 24, random_indices(3000, 500, 14), 14);
    Problem<float> expected = problem;
    expected.solve_plainly();
    for_each_set([&](const InstructionSet& set) {
        Problem<float> ours = problem;
        Job job = ours.job(set);
        std::vector<float> first(ours.values.begin(), ours.values.begin() + 1000 * 24);
        std::vector<float> second(ours.values.begin() + 1000 * 24, ours.values.end());
        std::vector<int64_t> value_index;
        const int64_t apart =
            (reinterpret_cast<intptr_t>(second.data()) - reinterpret_cast<intptr_t>(first.data())) /
            int64_t(sizeof(float));
        for (int64_t i = 0; i < 3000; ++i) {
            value_index.push_back(i < 1000 ? i * 24 : apart + (i - 1000) * 24);
        }
        const Memory parts[] = {{first.data(), int64_t(first.size() * sizeof(float))},
                                {second.data(), int64_t(second.size() * sizeof(float))}};
        job.value_index = value_index.data();
        job.values.data = first.data();
        job.values.slot_stride = 1;
        job.value_parts = parts;
        job.value_part_count = 2;
        check(!step(&job, 1, 2), "values in several places");
        check(ours == expected, std::string("values in several places with ") + set.name);
    });
}

void test_bad_positions_change_nothing() {
    for (int64_t bad : {int64_t(-1), int64_t(1000), int64_t(1) << 62, INT64_MIN, INT64_MAX}) {
        for (size_t at : {size_t(0), size_t(8191), size_t(8192), size_t(29999)}) {
            Problem<float> first(1000, 4, random_indices(500, 1000, 7), 7);
            Problem<float> second(1000, 4, random_indices(30000, 1000, 8), 8);
            second.indices[at] = bad;
            const Problem<float> before[] = {first, second};
            Job jobs[] = {first.job(instruction_sets()[0]), second.job(instruction_sets()[0])};
            const auto found = step(jobs, 2, 2);
            check(found && found->job == 1 && found->entry == int64_t(at) && found->index == bad,
                  "a bad position is reported");
            check(first == before[0] && second == before[1], "a bad position changes nothing");
        }
    }
}

void test_several_jobs_and_shared_memory() {
    std::vector<Problem<float>> problems;
    for (unsigned j = 0; j < 30; ++j) {
        problems.emplace_back(100 + j, 1 + j, random_indices(64 * j, 100 + j, j), j);
    }
    std::vector<Problem<float>> expected = problems;
    for (Problem<float>& problem : expected) problem.solve_plainly();
    std::vector<Job> jobs;
    for (Problem<float>& problem : problems) jobs.push_back(problem.job(widest()));
    check(!step(jobs.data(), int64_t(jobs.size()), 3), "several jobs");
    for (size_t j = 0; j < jobs.size(); ++j)
        check(problems[j] == expected[j], "one of several jobs");

    Problem<float> shared(3000, 16, random_indices(20000, 3000, 9), 9);
    Problem<float> twice = shared;
    twice.solve_plainly();
    twice.solve_plainly();
    Job same[] = {shared.job(instruction_sets()[0]), shared.job(instruction_sets()[0])};
    check(!step(same, 2, 4), "jobs that share memory");
    check(shared == twice, "jobs that share memory run one after the other");
}

void test_concurrent_steps() {
    std::vector<Problem<float>> problems;
    for (unsigned j = 0; j < 4; ++j) {
        problems.emplace_back(2000, 16, random_indices(20000, 2000, j), j);
    }
    std::vector<Problem<float>> expected = problems;
    for (Problem<float>& problem : expected) problem.solve_plainly();
    std::vector<std::thread> callers;
    for (Problem<float>& problem : problems) {
        callers.emplace_back([&problem] {
            Job job = problem.job(widest());
            step(&job, 1, 2);
        });
    }
    for (std::thread& caller : callers) caller.join();
    for (size_t j = 0; j < problems.size(); ++j) check(problems[j] == expected[j], "at once");
}

}  // namespace

void sparsestep::testing::test_steps() {
    test_shapes<float>();
    test_shapes<double>();
    test_long_rows_and_maximize();
    test_one_slot_has_most_entries();
    test_ascending_positions();
    test_regular_distances();
    test_slots_that_are_mostly_alone();
    test_whole_parameter();
    test_rows_of_values_by_number();
    test_values_in_several_places();
    test_bad_positions_change_nothing();
    test_several_jobs_and_shared_memory();
    test_concurrent_steps();
}
