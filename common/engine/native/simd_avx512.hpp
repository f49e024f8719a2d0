// Vectors of 16 floats: AVX-512 with bfloat16. To be included by simd.hpp alone.
#pragma once

namespace baton {

using Floats = __m512;
constexpr int64_t LANES = 16;
constexpr bool HAS_BFLOAT16_PRODUCTS = true;

inline __mmask16 first_lanes(int64_t count) {
    return count >= LANES ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
}

inline Floats all(float value) { return _mm512_set1_ps(value); }

inline Floats load(const float* from) { return _mm512_loadu_ps(from); }

inline Floats load(const bfloat16* from) {
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

inline void store(float* to, Floats values) { _mm512_storeu_ps(to, values); }

inline void store(bfloat16* to, Floats values) {
    const __m256bh narrow = _mm512_cvtneps_pbh(values);
    std::memcpy(to, &narrow, sizeof narrow);
}

inline Floats load(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), from); }

inline Floats load(const bfloat16* from, int64_t count) {
    const __m256i narrow = _mm256_maskz_loadu_epi16(first_lanes(count), from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

inline void store(float* to, Floats values, int64_t count) { _mm512_mask_storeu_ps(to, first_lanes(count), values); }

inline void store(bfloat16* to, Floats values, int64_t count) {
    const __m256bh narrow = _mm512_cvtneps_pbh(values);
    __m256i bits;
    std::memcpy(&bits, &narrow, sizeof bits);
    _mm256_mask_storeu_epi16(to, first_lanes(count), bits);
}

inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats multiply_subtract(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }

// Of two that can't be compared, the second one.
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }

inline float sum_of(Floats values) { return _mm512_reduce_add_ps(values); }
inline float largest_of(Floats values) { return _mm512_reduce_max_ps(values); }

inline Floats nearest_integer(Floats values) {
    return _mm512_roundscale_ps(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// values * 2^powers, for whole powers
inline Floats scale_by_power(Floats values, Floats powers) { return _mm512_scalef_ps(values, powers); }

// 0 where x <= bound; NaN is kept.
inline Floats zero_up_to(Floats values, Floats x, float bound) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(bound), _CMP_NLE_UQ), values);
}

// Lanes [from, to) are kept, which may lie outside; the others are `other`.
inline Floats keep_lanes(Floats values, int64_t from, int64_t to, Floats other) {
    const auto bound = [](int64_t lane) { return lane < 0 ? 0 : lane > LANES ? LANES : lane; };
    const __mmask16 seen = first_lanes(bound(to)) & ~first_lanes(bound(from));
    return _mm512_mask_mov_ps(other, seen, values);
}

// 16 rows of 16 words become 16 columns. Rows are `from[row] + offset`; column c goes to to + c * stride.
inline void transpose(const uint32_t* const* from, int64_t offset, uint32_t* to, int64_t stride) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from[i] + offset);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    // r[4 q + c] has words c, c + 4, c + 8, c + 12 of rows 4 q .. 4 q + 3, in lanes of 4.
    for (int c = 0; c < 4; ++c) {
        const __m512i low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);        // lanes 0, 2 of both
        const __m512i high = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        const __m512i low_odd = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);    // lanes 1, 3
        const __m512i high_odd = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
        _mm512_storeu_si512(to + c * stride, _mm512_shuffle_i32x4(low, high, 0x88));
        _mm512_storeu_si512(to + (c + 8) * stride, _mm512_shuffle_i32x4(low, high, 0xdd));
        _mm512_storeu_si512(to + (c + 4) * stride, _mm512_shuffle_i32x4(low_odd, high_odd, 0x88));
        _mm512_storeu_si512(to + (c + 12) * stride, _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd));
    }
}

// 32 elements of two rows in turns: low[0] high[0] low[1] high[1] ...
inline void interleave32(const bfloat16* low, const bfloat16* high, bfloat16* to) {
    static const __m512i FIRST = [] {
        alignas(64) uint16_t index[32];
        for (int i = 0; i < 32; ++i) index[i] = static_cast<uint16_t>(i / 2 + (i % 2) * 32);
        return _mm512_load_si512(index);
    }();
    const __m512i second = _mm512_add_epi16(FIRST, _mm512_set1_epi16(16));
    const __m512i a = _mm512_loadu_si512(low), b = _mm512_loadu_si512(high);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, FIRST, b));
    _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(a, second, b));
}

}  // namespace baton
