// Vectors of floats, as wide as this build's processor has them, and functions of them.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "paged_attention.hpp"

#ifdef __AVX512BF16__
#include "simd_avx512.hpp"
#else
#include "simd_avx2.hpp"
#endif

namespace baton {

// What an element of that type would keep of each value.
template <typename Element>
inline Floats rounded(Floats values) {
    if constexpr (sizeof(Element) == 4) {
        return values;
    } else {
        bfloat16 kept[LANES];
        store(kept, values);
        return load(kept);
    }
}

// e^x within 2 units in the last place, 0 far below, after Cephes' expf: x = n ln 2 + r, |r| <= ln 2 / 2.
inline Floats exponential(Floats x) {
    // Below this the result is no normal number; minus infinity must not become NaN on its way. What is NaN stays so:
    // of two operands that can't be compared, the second one is the result.
    x = larger(all(-88.0f), x);
    const Floats n = nearest_integer(x * all(1.44269504088896341f));
    Floats r = multiply_add(n, all(-0.693359375f), x);
    r = multiply_add(n, all(2.12194440e-4f), r);
    Floats p = all(1.9875691500e-4f);
    p = multiply_add(p, r, all(1.3981999507e-3f));
    p = multiply_add(p, r, all(8.3334519073e-3f));
    p = multiply_add(p, r, all(4.1665795894e-2f));
    p = multiply_add(p, r, all(1.6666665459e-1f));
    p = multiply_add(p, r, all(5.0000001201e-1f));
    p = multiply_add(r * r, p, r + all(1.0f));
    return scale_by_power(p, n);
}

// e^x, but 0 from -88 down: what is masked, at minus infinity, has no weight at all. NaN stays NaN, for a cache that is
// not finite must be seen in what is computed from it.
inline Floats weight_of(Floats x) { return zero_up_to(exponential(x), x, -88.0f); }

// c * tanh(x / c)
inline Floats softcap_of(Floats x, float cap) {
    // tanh is 1 in fp32 from 9.1 on, and e^(2x) must stay finite.
    const Floats y = exponential(smaller(all(40.0f), x * all(2.0f / cap)));
    const Floats one = all(1.0f);
    return (one - all(2.0f) / (y + one)) * all(cap);
}

}  // namespace baton
