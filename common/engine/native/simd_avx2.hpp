// Vectors of 8 floats: AVX2 with FMA. What they are is said in simd_avx512.hpp. To be included by simd.hpp alone.
#pragma once

namespace baton {

using Floats = __m256;
constexpr int64_t LANES = 8;
constexpr bool HAS_BFLOAT16_PRODUCTS = false;

inline __m256i lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

// Lanes below a count, as all ones.
inline __m256i first_lanes(int64_t count) {
    const int bound = count < 0 ? 0 : count > LANES ? LANES : static_cast<int>(count);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(bound), lane_numbers());
}

inline Floats all(float value) { return _mm256_set1_ps(value); }

inline Floats load(const float* from) { return _mm256_loadu_ps(from); }

inline Floats load(const bfloat16* from) {
    const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

inline void store(float* to, Floats values) { _mm256_storeu_ps(to, values); }

// To the nearest, of two as near the even one. NaN stays NaN, for its first bit behind the exponent is set.
inline void store(bfloat16* to, Floats values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m256i kept = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    const __m256i narrow = _mm256_permute4x64_epi64(_mm256_packus_epi32(kept, kept), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(narrow));
}

inline Floats load(const float* from, int64_t count) {
    return count >= LANES ? load(from) : _mm256_maskload_ps(from, first_lanes(count));
}

inline Floats load(const bfloat16* from, int64_t count) {
    if (count >= LANES) return load(from);
    bfloat16 some[LANES] = {};
    std::memcpy(some, from, count * sizeof *some);
    return load(some);
}

inline void store(float* to, Floats values, int64_t count) {
    if (count >= LANES) {
        store(to, values);
    } else {
        _mm256_maskstore_ps(to, first_lanes(count), values);
    }
}

inline void store(bfloat16* to, Floats values, int64_t count) {
    if (count >= LANES) return store(to, values);
    bfloat16 some[LANES];
    store(some, values);
    std::memcpy(to, some, count * sizeof *some);
}

inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats multiply_subtract(Floats a, Floats b, Floats c) { return _mm256_fmsub_ps(a, b, c); }

inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }

inline float sum_of(Floats values) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline float largest_of(Floats values) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

inline Floats nearest_integer(Floats values) {
    return _mm256_round_ps(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// In two steps, for a float's exponent has no room for all of -127 to 128. Powers beyond twice that are cut to it.
inline Floats scale_by_power(Floats values, Floats powers) {
    const __m256i whole = _mm256_cvtps_epi32(larger(smaller(powers, all(250.0f)), all(-250.0f)));
    const __m256i half = _mm256_srai_epi32(whole, 1);
    const auto power_of_two = [](__m256i power) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(power, _mm256_set1_epi32(127)), 23));
    };
    return values * power_of_two(half) * power_of_two(_mm256_sub_epi32(whole, half));
}

inline Floats zero_up_to(Floats values, Floats x, float bound) {
    return _mm256_and_ps(values, _mm256_cmp_ps(x, all(bound), _CMP_NLE_UQ));
}

inline Floats keep_lanes(Floats values, int64_t from, int64_t to, Floats other) {
    const __m256i seen = _mm256_andnot_si256(first_lanes(from), first_lanes(to));
    return _mm256_blendv_ps(other, values, _mm256_castsi256_ps(seen));
}

// 8 rows of 8 words become 8 columns.
inline void transpose(const uint32_t* const* from, int64_t offset, uint32_t* to, int64_t stride) {
    __m256i r[8], t[8];
    for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from[i] + offset));
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    // r[4 q + c] has words c and c + 4 of rows 4 q .. 4 q + 3, in lanes of 4.
    for (int c = 0; c < 4; ++c) {
        auto* first = reinterpret_cast<__m256i*>(to + c * stride);
        auto* second = reinterpret_cast<__m256i*>(to + (c + 4) * stride);
        _mm256_storeu_si256(first, _mm256_permute2x128_si256(r[c], r[4 + c], 0x20));
        _mm256_storeu_si256(second, _mm256_permute2x128_si256(r[c], r[4 + c], 0x31));
    }
}

}  // namespace baton
