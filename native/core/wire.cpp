#include "core/wire.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "core/splitmix.h"

namespace sparsestep {
namespace {

constexpr uint64_t golden = 0x9e3779b97f4a7c15u;
constexpr float most = 127;               // of an int8 code
constexpr float representable = 3.4e38f;  // times a scale, the largest code is finite
constexpr uint32_t infinity = 0x7f800000, sign = 0x80000000, largest_bf16 = 0x7f7f;

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

uint64_t hash_of(const float* row, int64_t dim, uint64_t seed) {
    uint64_t hash = splitmix(seed + golden);
    int64_t i = 0;
    for (; i + 2 <= dim; i += 2) {
        uint64_t word;
        std::memcpy(&word, row + i, sizeof word);
        hash = (hash ^ word) * golden;
        hash ^= hash >> 32;
    }
    if (i < dim) hash = (hash ^ bits_of(row[i])) * golden;
    return splitmix(hash);
}

// 16 random bits for each element of a row.
class RandomBits {
public:
    explicit RandomBits(uint64_t hash) : hash_(hash) {}
    uint32_t next() {
        if (left_ == 0) {
            word_ = splitmix(hash_ += golden);
            left_ = 4;
        }
        const uint32_t bits = uint32_t(word_ & 0xffff);
        word_ >>= 16;
        --left_;
        return bits;
    }

private:
    uint64_t hash_, word_ = 0;
    int left_ = 0;
};

class Nearest {
public:
    static uint32_t added(uint32_t bits) { return 0x7fff + (bits >> 16 & 1); }
    // Exact up to a million: the sum has no fractional bits.
    static float rounded(float value) { return (value + 12582912.0f) - 12582912.0f; }
};

class AtRandom {
public:
    explicit AtRandom(uint64_t hash) : bits_(hash) {}
    uint32_t added(uint32_t) { return bits_.next(); }
    float rounded(float value) {
        const float sum = value + float(bits_.next()) / 65536.0f, whole = float(int32_t(sum));
        return sum < whole ? whole - 1 : whole;
    }

private:
    RandomBits bits_;
};

// Finite values stay finite: above the largest bfloat16, they become the largest.
template <class Rounding>
uint16_t bf16_of(float value, Rounding& rounding) {
    const uint32_t bits = bits_of(value), size = bits & ~sign;
    const uint32_t added = rounding.added(bits);  // also for what it is not used for
    uint32_t code = size > infinity ? 0x7fc0 : (size + added) >> 16;
    if (size < infinity) code = std::min(code, largest_bf16);
    return uint16_t(code | (bits & sign) >> 16);
}

template <class Rounding>
void encode_bf16(const float* row, int64_t dim, Rounding rounding, char* codes) {
    for (int64_t i = 0; i < dim; ++i) {
        const uint16_t code = bf16_of(row[i], rounding);
        std::memcpy(codes + 2 * i, &code, sizeof code);
    }
}

// A NaN or inf makes the scale NaN, and so the whole row.
float scale_of(const float* row, int64_t dim) {
    uint32_t size = 0;
    for (int64_t i = 0; i < dim; ++i) size = std::max(size, bits_of(row[i]) & ~sign);
    float largest;
    std::memcpy(&largest, &size, sizeof largest);
    return size >= infinity ? NAN : std::max(std::min(largest, representable) / most, FLT_MIN);
}

template <class Rounding>
void encode_int8(const float* row, int64_t dim, Rounding rounding, char* codes) {
    const float scale = scale_of(row, dim), inverse = 1 / scale;
    const bool is_finite = scale == scale;
    for (int64_t i = 0; i < dim; ++i) {
        const float code = is_finite ? rounding.rounded(row[i] * inverse) : 0;
        codes[i] = char(int8_t(std::clamp(code, -most, most)));
    }
    std::memcpy(codes + dim, &scale, sizeof scale);
}

template <class Rounding>
void encode(WireFormat format, const float* row, int64_t dim, Rounding rounding, char* codes) {
    if (format == WireFormat::bf16) {
        encode_bf16(row, dim, rounding, codes);
    } else {
        encode_int8(row, dim, rounding, codes);
    }
}

}  // namespace

void encode_rows(WireFormat format, const float* values, int64_t rows, int64_t dim,
                 const uint64_t* seed, char* codes) {
    const int64_t bytes = wire_bytes(format, dim);
    for (int64_t row = 0; row < rows; ++row, values += dim, codes += bytes) {
        if (seed) {
            encode(format, values, dim, AtRandom(hash_of(values, dim, *seed)), codes);
        } else {
            encode(format, values, dim, Nearest(), codes);
        }
    }
}

void decode_rows(WireFormat format, const char* codes, int64_t rows, int64_t dim, float* values) {
    const int64_t bytes = wire_bytes(format, dim);
    for (int64_t row = 0; row < rows; ++row, values += dim, codes += bytes) {
        if (format == WireFormat::bf16) {
            for (int64_t i = 0; i < dim; ++i) {
                uint16_t code;
                std::memcpy(&code, codes + 2 * i, sizeof code);
                const uint32_t bits = uint32_t(code) << 16;
                std::memcpy(values + i, &bits, sizeof bits);
            }
            continue;
        }
        float scale;
        std::memcpy(&scale, codes + dim, sizeof scale);
        for (int64_t i = 0; i < dim; ++i) values[i] = float(int8_t(codes[i])) * scale;
    }
}

}  // namespace sparsestep
