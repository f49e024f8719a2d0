#include "layer_rows.hpp"

#include <cmath>

#include "simd.hpp"

namespace baton {

namespace {

// Elements below which one thread is done before a second one has begun.
constexpr int64_t SHARED_ELEMENTS = 1 << 15;

inline __mmask16 mask_of(int64_t left) {
    return left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
}

template <typename Element>
float inverse_rms(const Element* x, int64_t size, float epsilon) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
        const __m512 values = load16(x + i, mask_of(size - i));
        squares = _mm512_fmadd_ps(values, values, squares);
    }
    return 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(size) + epsilon);
}

// 16 elements of a row that is normed.
template <typename Element>
inline __m512 normed16(__m512 values, __m512 scale, const Element* weight, __mmask16 mask, bool is_offset) {
    const __m512 factors = load16(weight, mask);
    const __m512 scaled = _mm512_mul_ps(values, scale);
    if (is_offset) return _mm512_mul_ps(scaled, _mm512_add_ps(factors, _mm512_set1_ps(1.0f)));
    return _mm512_mul_ps(rounded16<Element>(scaled), factors);
}

inline __m512 silu16(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
inline __m512 gelu16(__m512 x) {
    const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
    const __m512 inner = _mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(0.7978845608f));
    const __m512 half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
    return _mm512_fmadd_ps(half, softcap16(inner, 1.0f), half);
}

// Rotated pairs that lie half a rotation apart, in fp32.
void turn_halves(float* head, const float* cosines, const float* sines, int64_t half) {
    for (int64_t i = 0; i < half; i += 16) {
        const __mmask16 mask = mask_of(half - i);
        const __m512 first = load16(head + i, mask), second = load16(head + half + i, mask);
        const __m512 cosine = load16(cosines + i, mask), sine = load16(sines + i, mask);
        store16(head + i, _mm512_fmsub_ps(first, cosine, _mm512_mul_ps(second, sine)), mask);
        store16(head + half + i, _mm512_fmadd_ps(second, cosine, _mm512_mul_ps(first, sine)), mask);
    }
}

void turn_neighbours(float* head, const float* cosines, const float* sines, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float first = head[2 * i], second = head[2 * i + 1];
        head[2 * i] = first * cosines[i] - second * sines[i];
        head[2 * i + 1] = second * cosines[i] + first * sines[i];
    }
}

template <typename Element>
void turn_head(const Element* x, Element* output, int64_t dim, const Norm<Element>& norm, const float* angles,
               int64_t rotated, bool is_interleaved) {
    alignas(64) float head[TURNED_DIM_MAX];
    const bool is_normed = norm.weight != nullptr;
    const __m512 scale = _mm512_set1_ps(is_normed ? inverse_rms(x, dim, norm.epsilon) : 1.0f);
    for (int64_t i = 0; i < dim; i += 16) {
        const __mmask16 mask = mask_of(dim - i);
        const __m512 values = load16(x + i, mask);
        store16(head + i, is_normed ? normed16(values, scale, norm.weight + i, mask, norm.is_offset) : values, mask);
    }
    const int64_t half = rotated / 2;
    (is_interleaved ? turn_neighbours : turn_halves)(head, angles, angles + half, half);
    for (int64_t i = 0; i < dim; i += 16) {
        const __mmask16 mask = mask_of(dim - i);
        store16(output + i, load16(head + i, mask), mask);
    }
}

}  // namespace

template <typename Element>
void norm_rows(Element* x, int64_t stride, const Element* added, Element* output, int64_t count, int64_t size,
               const Norm<Element>& norm) {
#pragma omp parallel for schedule(static) if (count * size > SHARED_ELEMENTS)
    for (int64_t row = 0; row < count; ++row) {
        Element* from = x + row * stride;
        if (added != nullptr) {
            for (int64_t i = 0; i < size; i += 16) {
                const __mmask16 mask = mask_of(size - i);
                store16(from + i, _mm512_add_ps(load16(from + i, mask), load16(added + row * size + i, mask)), mask);
            }
        }
        const __m512 scale = _mm512_set1_ps(inverse_rms(from, size, norm.epsilon));
        Element* to = output + row * size;
        for (int64_t i = 0; i < size; i += 16) {
            const __mmask16 mask = mask_of(size - i);
            const __m512 values = load16(from + i, mask);
            store16(to + i, normed16(values, scale, norm.weight + i, mask, norm.is_offset), mask);
        }
    }
}

template <typename Element>
void gate_rows(const Element* x, int64_t stride, Element* output, int64_t count, int64_t size, Gate gate) {
#pragma omp parallel for schedule(static) if (count * size > SHARED_ELEMENTS)
    for (int64_t row = 0; row < count; ++row) {
        const Element* from = x + row * stride;
        for (int64_t i = 0; i < size; i += 16) {
            const __mmask16 mask = mask_of(size - i);
            const __m512 values = load16(from + i, mask);
            const __m512 open = gate == Gate::silu ? silu16(values) : gelu16(values);
            const __m512 up = load16(from + size + i, mask);
            store16(output + row * size + i, _mm512_mul_ps(rounded16<Element>(open), up), mask);
        }
    }
}

template <typename Element>
void turn_heads(const Element* x, Element* output, const Heads& heads, const Norm<Element>& norm, const float* angles,
                int64_t rotated, bool is_interleaved) {
    const int64_t count = heads.row_count * heads.head_count;
#pragma omp parallel for schedule(static) if (count * heads.dim > SHARED_ELEMENTS)
    for (int64_t index = 0; index < count; ++index) {
        const int64_t row = index / heads.head_count, head = index % heads.head_count;
        Norm<Element> own = norm;
        if (own.weight != nullptr) own.weight += head * heads.dim;
        turn_head(x + row * heads.row_stride + head * heads.head_stride, output + index * heads.dim, heads.dim, own,
                  angles + row * rotated, rotated, is_interleaved);
    }
}

#define BATON_INSTANTIATE(Element)                                                                                  \
    template void norm_rows<Element>(Element*, int64_t, const Element*, Element*, int64_t, int64_t,                 \
                                     const Norm<Element>&);                                                         \
    template void gate_rows<Element>(const Element*, int64_t, Element*, int64_t, int64_t, Gate);                    \
    template void turn_heads<Element>(const Element*, Element*, const Heads&, const Norm<Element>&, const float*,   \
                                      int64_t, bool);
BATON_INSTANTIATE(float)
BATON_INSTANTIATE(bfloat16)
#undef BATON_INSTANTIATE

}  // namespace baton
