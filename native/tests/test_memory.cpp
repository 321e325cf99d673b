// Lazily provided arrays: zeroed, writable, movable, and refused where there is no memory.
#include <new>

#include "core/memory.h"
#include "testing.h"

namespace sparsestep::testing {
namespace {

bool is_refused(size_t count) {
    try {
        LazyArray<int64_t> array(count);
    } catch (const std::bad_alloc&) {
        return true;
    }
    return false;
}

}  // namespace

void test_memory() {
    for (size_t count : {size_t(1), size_t(1000), size_t(1) << 20}) {
        LazyArray<int64_t> array(count);
        bool zeroed = true;
        for (size_t i = 0; i < count; ++i) zeroed &= array[i] == 0;
        check(zeroed, "lazy: zeroed");
        array[count - 1] = 7;
        LazyArray<int64_t> moved(std::move(array));
        check(moved[count - 1] == 7, "lazy: moved");
    }
    LazyArray<int64_t> empty(0);
    check(is_refused(SIZE_MAX / 16), "lazy: too large for the address space");
    check(is_refused(SIZE_MAX / 8 + 2), "lazy: bytes overflow");
}

}  // namespace sparsestep::testing
