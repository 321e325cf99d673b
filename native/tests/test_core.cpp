// Runs the core's tests, or those of the groups named as arguments; see testing.h.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "testing.h"

using namespace sparsestep::testing;

int main(int count, char** names) {
    const std::pair<const char*, void (*)()> groups[] = {
        {"steps", test_steps},
        {"rules", test_rules},
        {"rows", test_rows},
        {"grads", test_grads},
        {"idle", test_idle},
        {"csr", test_csr},
        {"round_robin", test_round_robin},
        {"mapped_file", test_mapped_file},
        {"memory", test_memory},
        {"lookup", test_lookup},
        {"ngrams", test_ngrams},
        {"vocabulary", test_vocabulary},
        {"threads", test_threads},
    };
    int run = 0;
    for (const auto& [name, test] : groups) {
        bool chosen = count == 1;
        for (int i = 1; i < count; ++i) chosen |= std::strcmp(names[i], name) == 0;
        if (!chosen) continue;
        test();
        ++run;
    }
    check(count == 1 || run == count - 1, "every argument names a group");
    std::printf("core: %s\n", failures ? "FAILED" : "ok");
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
