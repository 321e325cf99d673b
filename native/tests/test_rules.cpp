// Every rule, with every instruction set and any number of threads: the same bits.
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/step.h"
#include "testing.h"

using namespace sparsestep;
using namespace sparsestep::testing;

namespace {

// Everything that one rule reads and writes, and what came out of it.
std::vector<float> outcome(const InstructionSet& set, int rule_index, int threads,
                           int64_t slot_size, bool whole, bool in_part) {
    const int64_t num_slots = 300, entries = whole ? num_slots : 2000;
    const RuleKernel& rule = set.in_float.rules[rule_index];
    std::mt19937 random(unsigned(slot_size) + 1);
    std::uniform_real_distribution<float> uniform(0.5f, 1.0f);
    const auto numbers = [&](int64_t count) {
        std::vector<float> result;
        for (int64_t i = 0; i < count; ++i) result.push_back(uniform(random));
        return result;
    };
    const std::vector<int64_t> indices = random_indices(entries, num_slots, 12);
    std::vector<float> values = numbers(entries * slot_size);
    std::vector<std::vector<float>> tensors{numbers(num_slots * slot_size)};
    const auto element_mask = std::make_unique<bool[]>(size_t(entries * slot_size));
    for (int64_t i = 0; i < entries * slot_size; ++i) element_mask[size_t(i)] = i % 3 != 0;
    const auto view = [](std::vector<float>& data, int64_t stride) {
        return TensorView{data.data(), Dtype::float32, stride, 1};
    };
    Job job{};
    job.all_slots = whole;
    job.indices = whole ? nullptr : indices.data();
    job.element_mask = in_part ? element_mask.get() : nullptr;
    job.entries = entries;
    job.num_slots = num_slots;
    job.slot_size = slot_size;
    job.maximize = true;
    job.coupled_decay = 0.125;
    job.values = view(values, slot_size);
    for (int s = 0; s < rule.states; ++s) tensors.push_back(numbers(num_slots * slot_size));
    for (int s = 0; s < rule.slot_states; ++s) tensors.push_back(numbers(num_slots));
    job.param = view(tensors[0], slot_size);
    for (int s = 0; s < rule.states; ++s) job.state[s] = view(tensors[size_t(1 + s)], slot_size);
    for (int s = 0; s < rule.slot_states; ++s) {
        job.slot_state[s] = view(tensors[size_t(1 + rule.states + s)], 1);
    }
    for (int i = 0; i < rule.options; ++i) job.options[i] = 0.5 - 0.03125 * i;
    job.step = 3;
    job.needs_whole_slots = rule.slot_states > 0;
    job.apply = rule.apply;
    check(!step(&job, 1, threads), "no bad entry");
    std::vector<float> all;
    for (const auto& tensor : tensors) all.insert(all.end(), tensor.begin(), tensor.end());
    return all;
}

void test_every_rule_everywhere_alike() {
    const auto& plainest = instruction_sets()[0];
    for (int rule = 0; rule < plainest.in_float.rule_count; ++rule) {
        for (int64_t slot_size : {1, 16, 37, 600}) {
            if (threads_only && slot_size != 37) continue;
            for (bool whole : {false, true}) {
                for (bool in_part : {false, true}) {
                    const auto expected = outcome(plainest, rule, 1, slot_size, whole, in_part);
                    for_each_set([&](const InstructionSet& set) {
                        const auto ours = outcome(set, rule, 3, slot_size, whole, in_part);
                        check(std::memcmp(ours.data(), expected.data(),
                                          ours.size() * sizeof(float)) == 0,
                              std::string(plainest.in_float.rules[rule].name) + " with " +
                                  set.name + ", block " + std::to_string(slot_size));
                    });
                }
            }
        }
    }
}

}  // namespace

void sparsestep::testing::test_rules() { test_every_rule_everywhere_alike(); }
