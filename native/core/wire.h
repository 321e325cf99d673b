// Rows in fewer bytes, for messages: see src/sparsestep/distributed/wire.py.
#pragma once

#include <cstdint>

namespace sparsestep {

enum class WireFormat { bf16, int8 };

// An int8 row ends with its scale, a float.
inline int64_t wire_bytes(WireFormat format, int64_t dim) {
    return format == WireFormat::bf16 ? 2 * dim : dim + int64_t(sizeof(float));
}

// Rounds to the nearest, ties to even; or, with a seed, up or down at random, in proportion. The
// random bits of a row are a hash of its values and the seed.
void encode_rows(WireFormat format, const float* values, int64_t rows, int64_t dim,
                 const uint64_t* seed, char* codes);

void decode_rows(WireFormat format, const char* codes, int64_t rows, int64_t dim, float* values);

}  // namespace sparsestep
