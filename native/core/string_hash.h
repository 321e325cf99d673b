// Ids of strings: BLAKE2b with a digest of eight bytes, as RFC 7693 defines it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparsestep {

struct Bytes {
    const char* data;
    size_t size;
};

// The digest of each, as a little-endian number.
void hash_strings(const Bytes* strings, int64_t count, int64_t* ids, int threads);

}  // namespace sparsestep
