#include "layer_rows.hpp"

#include <cmath>

#include "simd.hpp"

namespace baton {

namespace {

// Elements below which one thread is done before a second one has begun.
constexpr int64_t SHARED_ELEMENTS = 1 << 15;

template <typename Element>
float inverse_rms(const Element* x, int64_t size, float epsilon) {
    Floats squares = all(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        const Floats values = load(x + i, size - i);
        squares = multiply_add(values, values, squares);
    }
    return 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(size) + epsilon);
}

// A vector of a row that is normed, of which `count` elements are.
template <typename Element>
inline Floats normed(Floats values, Floats scale, const Element* weight, int64_t count, bool is_offset) {
    const Floats factors = load(weight, count), scaled = values * scale;
    return is_offset ? scaled * (factors + all(1.0f)) : rounded<Element>(scaled) * factors;
}

inline Floats silu(Floats x) {
    return x / (all(1.0f) + exponential(all(0.0f) - x));
}

// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
inline Floats gelu(Floats x) {
    const Floats cubic = multiply_add(x * x, all(0.044715f), all(1.0f));
    const Floats inner = x * cubic * all(0.7978845608f);
    const Floats half = x * all(0.5f);
    return multiply_add(half, softcap_of(inner, 1.0f), half);
}

// Rotated pairs that lie half a rotation apart, in fp32.
void turn_halves(float* head, const float* cosines, const float* sines, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const Floats first = load(head + i, half - i), second = load(head + half + i, half - i);
        const Floats cosine = load(cosines + i, half - i), sine = load(sines + i, half - i);
        store(head + i, multiply_subtract(first, cosine, second * sine), half - i);
        store(head + half + i, multiply_add(second, cosine, first * sine), half - i);
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
    const Floats scale = all(is_normed ? inverse_rms(x, dim, norm.epsilon) : 1.0f);
    for (int64_t i = 0; i < dim; i += LANES) {
        const Floats values = load(x + i, dim - i);
        store(head + i, is_normed ? normed(values, scale, norm.weight + i, dim - i, norm.is_offset) : values, dim - i);
    }
    const int64_t half = rotated / 2;
    (is_interleaved ? turn_neighbours : turn_halves)(head, angles, angles + half, half);
    for (int64_t i = 0; i < dim; i += LANES) {
        store(output + i, load(head + i, dim - i), dim - i);
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
            for (int64_t i = 0; i < size; i += LANES) {
                store(from + i, load(from + i, size - i) + load(added + row * size + i, size - i), size - i);
            }
        }
        const Floats scale = all(inverse_rms(from, size, norm.epsilon));
        Element* to = output + row * size;
        for (int64_t i = 0; i < size; i += LANES) {
            const Floats values = load(from + i, size - i);
            store(to + i, normed(values, scale, norm.weight + i, size - i, norm.is_offset), size - i);
        }
    }
}

template <typename Element>
void gate_rows(const Element* x, int64_t stride, Element* output, int64_t count, int64_t size, Gate gate) {
#pragma omp parallel for schedule(static) if (count * size > SHARED_ELEMENTS)
    for (int64_t row = 0; row < count; ++row) {
        const Element* from = x + row * stride;
        for (int64_t i = 0; i < size; i += LANES) {
            const Floats values = load(from + i, size - i);
            const Floats open = gate == Gate::silu ? silu(values) : gelu(values);
            const Floats up = load(from + size + i, size - i);
            store(output + row * size + i, rounded<Element>(open) * up, size - i);
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
