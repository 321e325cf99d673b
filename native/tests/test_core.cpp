// Runs the core's tests; see testing.h.
#include <cstdio>
#include <cstdlib>

#include "testing.h"

using namespace sparsestep::testing;

int main() {
    test_steps();
    test_rules();
    test_tiles();
    test_norms();
    test_catch_up();
    test_compressed();
    test_owners();
    test_mapped();
    test_lazy();
    test_lookup();
    test_vocabulary();
    std::printf("core: %s\n", failures ? "FAILED" : "ok");
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
