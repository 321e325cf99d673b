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
std::vector<float> outcome(const InstructionSet& set, int rule_index, int threads, int64_t block,
                           bool whole, bool in_part) {
    const int64_t slots = 300, entries = whole ? slots : 2000;
    const RuleKernel& rule = set.in_float.rules[rule_index];
    std::mt19937 random(unsigned(block) + 1);
    std::uniform_real_distribution<float> uniform(0.5f, 1.0f);
    const auto numbers = [&](int64_t count) {
        std::vector<float> result;
        for (int64_t i = 0; i < count; ++i) result.push_back(uniform(random));
        return result;
    };
    const std::vector<int64_t> positions = random_positions(entries, slots, 12);
    std::vector<float> values = numbers(entries * block);
    std::vector<std::vector<float>> tensors{numbers(slots * block)};
    const auto held = std::make_unique<bool[]>(size_t(entries * block));
    for (int64_t i = 0; i < entries * block; ++i) held[size_t(i)] = i % 3 != 0;
    const auto view = [](std::vector<float>& data, int64_t stride) {
        return View{data.data(), Dtype::float32, stride, 1};
    };
    Job job{};
    job.whole = whole;
    job.positions = whole ? nullptr : positions.data();
    job.held = in_part ? held.get() : nullptr;
    job.entries = entries;
    job.slots = slots;
    job.block = block;
    job.negate = true;
    job.l2 = 0.125;
    job.values = view(values, block);
    for (int s = 0; s < rule.states; ++s) tensors.push_back(numbers(slots * block));
    for (int s = 0; s < rule.slot_states; ++s) tensors.push_back(numbers(slots));
    job.param = view(tensors[0], block);
    for (int s = 0; s < rule.states; ++s) job.state[s] = view(tensors[size_t(1 + s)], block);
    for (int s = 0; s < rule.slot_states; ++s) {
        job.slot_state[s] = view(tensors[size_t(1 + rule.states + s)], 1);
    }
    for (int i = 0; i < rule.options; ++i) job.options[i] = 0.5 - 0.03125 * i;
    job.step = 3;
    job.by_slot = rule.slot_states > 0;
    job.apply = rule.apply;
    check(!step(&job, 1, threads), "no bad entry");
    std::vector<float> all;
    for (const auto& tensor : tensors) all.insert(all.end(), tensor.begin(), tensor.end());
    return all;
}

void test_every_rule_everywhere_alike() {
    const auto& plainest = instruction_sets()[0];
    for (int rule = 0; rule < plainest.in_float.rule_count; ++rule) {
        for (int64_t block : {1, 16, 37, 600}) {
            if (threads_only && block != 37) continue;
            for (bool whole : {false, true}) {
                for (bool in_part : {false, true}) {
                    const auto expected = outcome(plainest, rule, 1, block, whole, in_part);
                    for_each_set([&](const InstructionSet& set) {
                        const auto ours = outcome(set, rule, 3, block, whole, in_part);
                        check(std::memcmp(ours.data(), expected.data(),
                                          ours.size() * sizeof(float)) == 0,
                              std::string(plainest.in_float.rules[rule].name) + " with " +
                                  set.name + ", block " + std::to_string(block));
                    });
                }
            }
        }
    }
}

}  // namespace

void sparsestep::testing::test_rules() { test_every_rule_everywhere_alike(); }
