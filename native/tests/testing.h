// What the core's tests share. They need no Python, so that they can run under the sanitizers:
// `make sanitize`. Everything is compared with the plainest loop that does the same.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "core/instruction_sets.h"

namespace sparsestep::testing {

// Under ThreadSanitizer, which is slow, only what threads do is tested.
#if defined(__SANITIZE_THREAD__)
constexpr bool threads_only = true;
#else
constexpr bool threads_only = false;
#endif

inline int failures = 0;

inline void check(bool holds, const std::string& what) {
    if (holds) return;
    ++failures;
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

inline void for_each_set(const std::function<void(const InstructionSet&)>& body) {
    for (const InstructionSet& set : instruction_sets()) {
        if (set.available) body(set);
    }
}

// The widest that this machine has.
inline const InstructionSet& widest() {
    const InstructionSet* found = nullptr;
    for (const InstructionSet& set : instruction_sets()) {
        if (set.available) found = &set;
    }
    return *found;
}

inline std::vector<int64_t> random_indices(int64_t count, int64_t num_slots, unsigned seed) {
    std::mt19937_64 random(seed);
    std::vector<int64_t> result;
    for (int64_t i = 0; i < count; ++i) result.push_back(int64_t(random() % uint64_t(num_slots)));
    return result;
}

// One file each.
void test_steps();
void test_rules();
void test_rows();
void test_grads();
void test_idle();
void test_csr();
void test_round_robin();
void test_mapped_file();
void test_memory();
void test_lookup();
void test_ngrams();
void test_vocabulary();
void test_threads();

}  // namespace sparsestep::testing
