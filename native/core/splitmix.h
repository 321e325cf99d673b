// A hash that is the same everywhere: which row an id or an n-gram has depends on it.
#pragma once

#include <cstdint>

namespace sparsestep {

// The finalizer of splitmix64.
inline uint64_t splitmix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

}  // namespace sparsestep
