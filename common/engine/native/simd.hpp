// Vectors of 16 floats, and the three ways in which rows of a cache are laid out for products. AVX-512 only.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "paged_attention.hpp"

namespace baton {

inline __m512 load16(const float* from) { return _mm512_loadu_ps(from); }

inline __m512 load16(const bfloat16* from) {
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

inline void store16(float* to, __m512 values) { _mm512_storeu_ps(to, values); }

inline void store16(bfloat16* to, __m512 values) {
    const __m256bh narrow = _mm512_cvtneps_pbh(values);
    std::memcpy(to, &narrow, sizeof narrow);
}

// The first elements alone, as many as the mask has; the others are 0, and are not written.
inline __m512 load16(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }

inline __m512 load16(const bfloat16* from, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

inline void store16(float* to, __m512 values, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, values); }

inline void store16(bfloat16* to, __m512 values, __mmask16 mask) {
    const __m256bh narrow = _mm512_cvtneps_pbh(values);
    __m256i bits;
    std::memcpy(&bits, &narrow, sizeof bits);
    _mm256_mask_storeu_epi16(to, mask, bits);
}

// What an element of that type would keep of each value.
template <typename Element>
inline __m512 rounded16(__m512 values) {
    if constexpr (sizeof(Element) == 4) {
        return values;
    } else {
        bfloat16 kept[16];
        store16(kept, values);
        return load16(kept);
    }
}

// e^x within 2 units in the last place, 0 far below, after Cephes' expf: x = n ln 2 + r, |r| <= ln 2 / 2.
inline __m512 exp16(__m512 x) {
    // Below this the result is no normal number; minus infinity must not become NaN on its way. What is NaN stays so:
    // of two operands that can't be compared, the second one is the result.
    x = _mm512_max_ps(_mm512_set1_ps(-88.0f), x);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)),
                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

// e^x, but 0 from -88 down: what is masked, at minus infinity, has no weight at all. NaN stays NaN, for a cache that is
// not finite must be seen in what is computed from it.
inline __m512 weight16(__m512 x) {
    const __mmask16 is_seen = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-88.0f), _CMP_NLE_UQ);
    return _mm512_maskz_mov_ps(is_seen, exp16(x));
}

// c * tanh(x / c)
inline __m512 softcap16(__m512 x, float cap) {
    // tanh is 1 in fp32 from 9.1 on, and e^(2x) must stay finite.
    __m512 y = _mm512_mul_ps(x, _mm512_set1_ps(2.0f / cap));
    y = exp16(_mm512_min_ps(_mm512_set1_ps(40.0f), y));
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 rest = _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(y, one));
    return _mm512_mul_ps(_mm512_sub_ps(one, rest), _mm512_set1_ps(cap));
}

// 16 rows of 16 words become 16 columns. Rows are `from[row] + offset`; column c goes to to + c * stride.
inline void transpose16(const uint32_t* const* from, int64_t offset, uint32_t* to, int64_t stride) {
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

// Elements of two rows in turns: low[0] high[0] low[1] high[1] ...
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
