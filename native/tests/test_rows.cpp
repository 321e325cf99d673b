// Half precision: read, and written back to the nearest neighbour or to one at random.
#include <cmath>
#include <cstdint>
#include <string>

#include "kernels/rows.h"
#include "testing.h"

using namespace sparsestep;
using namespace sparsestep::testing;

namespace {

void test_random_rounding() {
    // Always one of the two neighbours, the value itself where it is one, up as often as it should.
    int up = 0;
    const Randomness random(7, 1);
    for (int64_t i = 0; i < 100000; ++i) {
        const float value = 1.0f + 0.25f / 128;
        const float rounded = Bfloat16::random(value, random(i));
        check(rounded == 1.0f || rounded == 1.0f + 1.0f / 128, "a neighbour");
        up += rounded > value;
        check(float(Bfloat16::random(-1.5f, random(i))) == -1.5f, "bfloat16 stays");
        check(float(Float16::random(-1.5f, random(i))) == -1.5f, "float16 stays");
        const float tiny = 5.0f / 16777216.0f;
        check(float(Float16::random(tiny, random(i))) == tiny, "float16 subnormal stays");
    }
    check(up > 24300 && up < 25700, "a quarter of the way, a quarter of the times");
    check(std::isinf(float(Float16::random(1e6f, 0))), "float16 overflows");
    check(std::isinf(float(Bfloat16::random(INFINITY, 0xffffffffu))), "bfloat16 infinite");
    check(std::isnan(float(Bfloat16::random(NAN, 0))), "bfloat16 NaN");
    check(std::isnan(float(Float16::random(NAN, 0))), "float16 NaN");
}

void test_half_precision() {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
        const Float16 half{uint16_t(bits)};
        const Bfloat16 brain{uint16_t(bits)};
        const float from_half = half, from_brain = brain;
        const bool nan = (bits & 0x7c00u) == 0x7c00u && bits & 0x3ffu;
        const int exponent = int(bits >> 10 & 31);
        const double mantissa = double(bits & 0x3ffu) / 1024;
        const double magnitude = exponent == 31  ? INFINITY
                                 : exponent == 0 ? std::ldexp(mantissa, -14)
                                                 : std::ldexp(1 + mantissa, exponent - 15);
        check(nan ? from_half != from_half
                  : double(from_half) == (bits & 0x8000u ? -magnitude : magnitude),
              "float16 " + std::to_string(bits) + " is read");
        check(nan || Float16::nearest(from_half).bits == bits, "float16 is written back");
        check(from_brain != from_brain || Bfloat16::nearest(from_brain).bits == bits,
              "bfloat16 is written back");
    }
    // Halfway cases go to the even neighbour, anything beyond to the nearer one.
    for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
        const float low = Float16{uint16_t(bits)}, high = Float16{uint16_t(bits + 1)};
        const float middle = (low + high) / 2;
        check(Float16::nearest(middle).bits == (bits & 1 ? bits + 1 : bits), "float16 tie");
        check(Float16::nearest(std::nextafter(middle, high)).bits == bits + 1, "float16 up");
        check(Float16::nearest(std::nextafter(middle, low)).bits == bits, "float16 down");
    }
    check(Float16::nearest(65519.0f).bits == 0x7bff, "float16 largest");
    check(Float16::nearest(65520.0f).bits == 0x7c00, "float16 infinite");
    check(Float16::nearest(-INFINITY).bits == 0xfc00, "float16 minus infinite");
    check(std::isnan(float(Float16::nearest(NAN))), "float16 NaN");
    check(std::isnan(float(Bfloat16::nearest(NAN))), "bfloat16 NaN");
}

}  // namespace

void sparsestep::testing::test_rows() {
    if (threads_only) return;
    test_random_rounding();
    test_half_precision();
}
