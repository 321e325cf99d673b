#include "core/cpu.h"

#if defined(_MSC_VER)
#include <immintrin.h>
#include <intrin.h>
#endif

namespace sparsestep {

#if defined(__x86_64__) && defined(_MSC_VER)

namespace {

// What the processor has and the system saves: leaf 7, and the registers in XCR0.
bool has(int ebx_bits, unsigned long long saved) {
    int leaf[4];
    __cpuid(leaf, 0);
    if (leaf[0] < 7) return false;
    __cpuid(leaf, 1);
    constexpr int osxsave = 1 << 27;
    if (!(leaf[2] & osxsave) || (_xgetbv(0) & saved) != saved) return false;
    __cpuidex(leaf, 7, 0);
    return (leaf[1] & ebx_bits) == ebx_bits;
}

constexpr int bit(int place) { return int(1u << place); }

}  // namespace

bool has_avx2() { return has(bit(5), 0x6); }

bool has_avx512() { return has(bit(16) | bit(17) | bit(30) | bit(31), 0xe6); }

#elif defined(__x86_64__)

bool has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool has_avx512() {
    __builtin_cpu_init();
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}

#else

bool has_avx2() { return false; }

bool has_avx512() { return false; }

#endif

}  // namespace sparsestep
