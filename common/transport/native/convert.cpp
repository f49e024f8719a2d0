#include "convert.hpp"

#include <bit>

// Chosen when the library is loaded: the loops below are simple enough to be vectorized as wide as the
// processor allows.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define BATON_WIDE __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define BATON_WIDE
#endif

namespace baton {

namespace {

// float8_e4m3fn: sign, 4 exponent bits with bias 7, 3 of the fraction; no infinity, one NaN per sign.
constexpr uint32_t LARGEST = 0x7e;                // 448
constexpr uint32_t NOT_A_NUMBER = 0x7f;
constexpr uint32_t OVERFLOW_FROM = 0x43e00000;    // 448 and all above it as bits of a float
constexpr uint32_t INFINITE = 0x7f800000;
constexpr uint32_t NORMAL_FROM = 0x3c800000;      // 2^-6, the smallest normal number
// Adding it leaves a subnormal's fraction, rounded to nearest even, in the lowest bits of the sum.
constexpr uint32_t SUBNORMAL_SHIFTER = ((127 - 7) + (23 - 3) + 1) << 23;

inline uint8_t narrow(uint32_t bits) {
    const uint32_t sign = (bits >> 24) & 0x80;
    const uint32_t size = bits & 0x7fffffff;
    const float shifted = std::bit_cast<float>(size) + std::bit_cast<float>(SUBNORMAL_SHIFTER);
    const uint32_t subnormal = std::bit_cast<uint32_t>(shifted) - SUBNORMAL_SHIFTER;
    const uint32_t is_odd = (size >> 20) & 1;
    const uint32_t normal = (size - (120u << 23) + 0x7ffff + is_odd) >> 20;
    uint32_t narrowed = size < NORMAL_FROM ? subnormal : normal;
    narrowed = size >= OVERFLOW_FROM ? LARGEST : narrowed;
    narrowed = size > INFINITE ? NOT_A_NUMBER : narrowed;
    return static_cast<uint8_t>(narrowed | sign);
}

// The bits of the float. No subnormal float is computed with: each would cost a hundred cycles, and
// caches are full of small numbers.
inline uint32_t widen(uint8_t byte) {
    const uint32_t size = byte & 0x7fu;
    const float subnormal = static_cast<float>(static_cast<int32_t>(size)) * 0x1p-9f;
    const uint32_t normal = (size << 20) + (120u << 23);
    const uint32_t finite = size < 8 ? std::bit_cast<uint32_t>(subnormal) : normal;
    const uint32_t sign = (byte & 0x80u) << 24;
    return (size == NOT_A_NUMBER ? 0x7fc00000u : finite) | sign;
}

}  // namespace

BATON_WIDE void narrow_bfloat16(uint8_t* target, const uint16_t* source, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        target[i] = narrow(static_cast<uint32_t>(source[i]) << 16);
    }
}

BATON_WIDE void narrow_float32(uint8_t* target, const uint32_t* source, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        target[i] = narrow(source[i]);
    }
}

BATON_WIDE void widen_bfloat16(uint16_t* target, const uint8_t* source, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        target[i] = static_cast<uint16_t>(widen(source[i]) >> 16);
    }
}

BATON_WIDE void widen_float32(uint32_t* target, const uint8_t* source, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        target[i] = widen(source[i]);
    }
}

}  // namespace baton
