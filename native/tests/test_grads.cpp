// The norms of a gradient's slots, which clipping needs.
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "core/step.h"
#include "testing.h"

using namespace sparsestep;
using namespace sparsestep::testing;

namespace {

struct Problem {
    int64_t num_slots, slot_size;
    std::vector<int64_t> indices;
    std::vector<float> values;

    Problem(int64_t num_slots, int64_t slot_size, int64_t entries, unsigned seed)
        : num_slots(num_slots),
          slot_size(slot_size),
          indices(random_indices(entries, num_slots, seed)) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        for (int64_t i = 0; i < entries * slot_size; ++i) values.push_back(normal(random));
    }

    // A norm for each entry: that of the slot for the first of a slot, zero for the others.
    std::vector<double> solved_plainly(Norm order) const {
        std::map<int64_t, size_t> first;
        std::map<int64_t, std::vector<float>> sums;
        for (size_t i = 0; i < indices.size(); ++i) {
            const float* row = &values[i * size_t(slot_size)];
            if (first.emplace(indices[i], i).second) {
                sums[indices[i]].assign(row, row + slot_size);
            } else {
                for (int64_t j = 0; j < slot_size; ++j) sums[indices[i]][size_t(j)] += row[j];
            }
        }
        std::vector<double> result(indices.size(), 0.0);
        for (const auto& [slot, sum] : sums) {
            double total = 0;
            for (const float x : sum) {
                const double size = std::abs(double(x));
                if (order == Norm::largest) {
                    total = std::max(total, size);
                } else {
                    total += order == Norm::squares ? size * size : size;
                }
            }
            result[first[slot]] = order == Norm::squares ? std::sqrt(total) : total;
        }
        return result;
    }

    Job job(const InstructionSet& set, Norm order, std::vector<double>& norms) {
        Job result{};
        result.indices = indices.data();
        result.entries = int64_t(indices.size());
        result.num_slots = num_slots;
        result.slot_size = slot_size;
        result.values = {values.data(), Dtype::float32, slot_size, 1};
        result.needs_whole_slots = true;
        result.order = order;
        result.norms = norms.data();
        result.apply = set.in_float.norms;
        return result;
    }
};

void test_against_plain_loops() {
    for (int64_t entries : {0, 1, 40, 5000}) {
        if (threads_only && entries < 5000) continue;
        for (int64_t slot_size : {1, 7, 16, 600}) {
            if (entries == 5000 && slot_size == 600) continue;
            for (Norm order : {Norm::sum, Norm::squares, Norm::largest}) {
                Problem problem(23, slot_size, entries, unsigned(entries + slot_size));
                const std::vector<double> wanted = problem.solved_plainly(order);
                const std::string what = "norm " + std::to_string(int(order)) + " of " +
                                         std::to_string(entries) + " x " +
                                         std::to_string(slot_size);
                std::vector<double> before;
                for_each_set([&](const InstructionSet& set) {
                    for (int threads : {1, 3}) {
                        std::vector<double> norms(wanted.size(), 0.0);
                        Job job = problem.job(set, order, norms);
                        check(!step(&job, 1, threads), what + ": no bad entry");
                        for (size_t i = 0; i < norms.size(); ++i) {
                            check(std::abs(norms[i] - wanted[i]) <= 1e-13 * wanted[i], what);
                        }
                        check(before.empty() || norms == before, what + ": the same bits");
                        before = norms;
                    }
                });
            }
        }
    }
}

void test_what_is_not_finite() {
    for (Norm order : {Norm::sum, Norm::squares, Norm::largest}) {
        for_each_set([&](const InstructionSet& set) {
            Problem problem(3, 2, 0, 1);
            problem.indices = {2, 0, 1};
            problem.values = {NAN, 1, INFINITY, 2, 3e38f, 3e38f};
            std::vector<double> norms(3, 0.0);
            Job job = problem.job(set, order, norms);
            step(&job, 1, 1);
            check(std::isnan(norms[0]) && std::isinf(norms[1]) && std::isfinite(norms[2]),
                  "norms of what is not finite");
        });
    }
}

void test_bad_positions() {
    Problem problem(5, 2, 30, 3);
    problem.indices[17] = 5;
    std::vector<double> norms(30, -1.0);
    Job job = problem.job(instruction_sets()[0], Norm::squares, norms);
    const auto bad = step(&job, 1, 2);
    check(bad && bad->index == 5 && bad->entry == 17, "a bad position is reported");
    check(norms == std::vector<double>(30, -1.0), "and nothing is written");
}

}  // namespace

void sparsestep::testing::test_grads() {
    test_against_plain_loops();
    test_what_is_not_finite();
    test_bad_positions();
}
