#include "core/string_hash.h"

#include <algorithm>
#include <cstring>

#include "core/cpu.h"
#include "core/threads.h"

namespace sparsestep {
namespace {

constexpr size_t block_bytes = 128;
constexpr int words = 16, rounds = 12;
constexpr uint64_t initial[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                                 0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
                                 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
constexpr uint64_t parameters = 0x01010008;  // no key, one leaf, eight bytes

constexpr uint8_t order[10][words] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

#define SPARSESTEP_INLINE __attribute__((always_inline)) inline

// One number, or several of different strings side by side.
template <int lanes>
struct Lanes {
    typedef uint64_t Word __attribute__((vector_size(8 * lanes)));
};
template <>
struct Lanes<1> {
    typedef uint64_t Word;
};

template <class Word>
SPARSESTEP_INLINE void rotate(Word& word, int by) {
    word = (word >> by) | (word << (64 - by));
}

template <class Word>
SPARSESTEP_INLINE void mix(Word& a, Word& b, Word& c, Word& d, const Word& x, const Word& y) {
    a += b + x;
    d ^= a;
    rotate(d, 32);
    c += d;
    b ^= c;
    rotate(b, 24);
    a += b + y;
    d ^= a;
    rotate(d, 16);
    c += d;
    b ^= c;
    rotate(b, 63);
}

// `end`: how many bytes there are up to the end of the block; `last`: all bits, or none.
template <class Word>
SPARSESTEP_INLINE void compress(Word (&hash)[8], const Word (&block)[words], const Word& end,
                                uint64_t last) {
    Word v[words] = {};
    for (int i = 0; i < 8; ++i) {
        v[i] = hash[i];
        v[i + 8] = Word{} + initial[i];
    }
    v[12] ^= end;
    v[14] ^= last;
    for (int round = 0; round < rounds; ++round) {
        const uint8_t* const s = order[round % 10];
        mix(v[0], v[4], v[8], v[12], block[s[0]], block[s[1]]);
        mix(v[1], v[5], v[9], v[13], block[s[2]], block[s[3]]);
        mix(v[2], v[6], v[10], v[14], block[s[4]], block[s[5]]);
        mix(v[3], v[7], v[11], v[15], block[s[6]], block[s[7]]);
        mix(v[0], v[5], v[10], v[15], block[s[8]], block[s[9]]);
        mix(v[1], v[6], v[11], v[12], block[s[10]], block[s[11]]);
        mix(v[2], v[7], v[8], v[13], block[s[12]], block[s[13]]);
        mix(v[3], v[4], v[9], v[14], block[s[14]], block[s[15]]);
    }
    for (int i = 0; i < 8; ++i) hash[i] ^= v[i] ^ v[i + 8];
}

template <class Word>
SPARSESTEP_INLINE void begin(Word (&hash)[8]) {
    for (int i = 0; i < 8; ++i) hash[i] = Word{} + initial[i];
    hash[0] ^= parameters;
}

SPARSESTEP_INLINE uint64_t read_word(const char* data, size_t bytes) {
    uint64_t word = 0;
    for (size_t i = 0; i < bytes; ++i) word |= uint64_t(uint8_t(data[i])) << (8 * i);
    return word;
}

int64_t hash_long(const Bytes& string) {
    uint64_t hash[8], block[words];
    begin(hash);
    size_t at = 0;
    for (bool is_last = false; !is_last; at += block_bytes) {
        is_last = string.size - at <= block_bytes;
        for (size_t i = 0; i < words; ++i) {
            const size_t from = std::min(at + 8 * i, string.size);
            block[i] = read_word(string.data + from, std::min<size_t>(8, string.size - from));
        }
        const uint64_t end = std::min(at + block_bytes, string.size);
        compress(hash, block, end, is_last ? ~uint64_t(0) : 0);
    }
    return int64_t(hash[0]);
}

// Strings of one block, as many as there are lanes at a time.
template <int lanes>
SPARSESTEP_INLINE void hash_some(const Bytes* strings, int64_t count, int64_t* ids) {
    typedef typename Lanes<lanes>::Word Word;
    int64_t next = 0;
    while (next < count) {
        alignas(64) uint64_t text[words][lanes] = {}, ends[lanes] = {};
        int64_t which[lanes];
        int used = 0;
        for (; next < count && used < lanes; ++next) {
            const Bytes& string = strings[next];
            if (string.size > block_bytes) {
                ids[next] = hash_long(string);
                continue;
            }
            const size_t whole = string.size / 8;
            for (size_t i = 0; i < whole; ++i) text[i][used] = read_word(string.data + 8 * i, 8);
            if (string.size % 8) {
                text[whole][used] = read_word(string.data + 8 * whole, string.size % 8);
            }
            ends[used] = string.size;
            which[used++] = next;
        }
        Word hash[8], block[words], end;
        std::memcpy(block, text, sizeof(block));
        std::memcpy(&end, ends, sizeof(end));
        begin(hash);
        compress(hash, block, end, ~uint64_t(0));
        uint64_t found[lanes];
        std::memcpy(found, &hash[0], sizeof(found));
        for (int lane = 0; lane < used; ++lane) ids[which[lane]] = int64_t(found[lane]);
    }
}

void hash_plain(const Bytes* strings, int64_t count, int64_t* ids) {
    hash_some<2>(strings, count, ids);
}

typedef void Hash(const Bytes*, int64_t, int64_t*);

#if defined(__x86_64__)
__attribute__((target("avx2"))) void hash_avx2(const Bytes* strings, int64_t count, int64_t* ids) {
    hash_some<4>(strings, count, ids);
}

#if defined(__clang__)  // ignores an attribute with an option that it does not know
#define SPARSESTEP_AVX512 "avx512f"
#else
#define SPARSESTEP_AVX512 "avx512f,prefer-vector-width=512"
#endif
__attribute__((target(SPARSESTEP_AVX512))) void hash_avx512(const Bytes* strings, int64_t count,
                                                            int64_t* ids) {
    hash_some<8>(strings, count, ids);
}

Hash* fastest() { return has_avx512() ? hash_avx512 : has_avx2() ? hash_avx2 : hash_plain; }
#else
Hash* fastest() { return hash_plain; }
#endif

}  // namespace

void hash_strings(const Bytes* strings, int64_t count, int64_t* ids, int threads) {
    static Hash* const hash = fastest();
    constexpr int64_t chunk = 4096;
    parallel(threads, (count + chunk - 1) / chunk, [&](int64_t task) {
        const int64_t first = task * chunk;
        hash(strings + first, std::min(chunk, count - first), ids + first);
    });
}

}  // namespace sparsestep
