// The loops. Compiled once for every instruction set, each time into the namespace BATON_ISA, and
// therefore without anything of the standard library that the linker could take from another one.
//
// Eight lanes everywhere: what a sum adds to what depends on no instruction set, only whether a
// product and a sum are rounded once or twice.
#include "kernels.hpp"

#include <cmath>

#define INLINE inline __attribute__((always_inline))

namespace baton::BATON_ISA {
namespace {

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef double Doubles __attribute__((vector_size(8 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

INLINE Floats all(float value) { return Floats{} + value; }

INLINE Floats load(const float* from) {
    Floats values;
    __builtin_memcpy(&values, from, sizeof values);
    return values;
}

// bfloat16 is the upper half of a float.
INLINE Floats load(const uint16_t* from) {
    Halves halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

INLINE void store(float* to, Floats values) { __builtin_memcpy(to, &values, sizeof values); }

// To the nearest, ties to even; NaN stays NaN.
INLINE void store(uint16_t* to, Floats values) {
    const Words bits = (Words)values;
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words kept = (Words)(values == values);
    const Halves halves = __builtin_convertvector((rounded & kept) | (~kept & 0x7fc0), Halves);
    __builtin_memcpy(to, &halves, sizeof halves);
}

INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Lane i of the result is the sum of some lanes of a or b; three rounds make eight whole sums.
INLINE Floats add_pairs(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
           __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
}

INLINE Floats add_quads(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}

INLINE Floats add_halves(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

// Lane i of the result is the sum of parts[i].
INLINE Floats sums(const Floats* parts) {
    return add_halves(
        add_quads(add_pairs(parts[0], parts[1]), add_pairs(parts[2], parts[3])),
        add_quads(add_pairs(parts[4], parts[5]), add_pairs(parts[6], parts[7])));
}

INLINE float sum(Floats a) {
    const float first = (a[0] + a[1]) + (a[2] + a[3]);
    return first + ((a[4] + a[5]) + (a[6] + a[7]));
}

// e^x to 2 units in the last place: 2^n times the polynomial of Cephes' expf on the rest. What would
// leave the range of float comes out as about 1e-38 or 1e38; NaN stays NaN.
INLINE Floats exponential(Floats x) {
    x = x < -87.0f ? all(-87.0f) : x;
    x = x > 88.0f ? all(88.0f) : x;
    constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const Floats shifted = x * 1.44269504f + kToInteger;
    const Floats n = shifted - kToInteger;
    const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const Ints power = ((Ints)shifted - 0x4b400000 + 127) << 23;
    return p * (Floats)power;
}

// ---- attention ----------------------------------------------------------------------------------

// The tokens of a sequence that are seen, page by page: body(first item in the page, count, page,
// number of the first token among those seen).
template <typename Body>
INLINE void each_page(const Attend& a, int64_t sequence, Body body) {
    const int64_t stop = a.lengths[sequence];
    const int64_t start = a.window && a.window < stop ? stop - a.window : 0;
    const int32_t* table = a.page_table + sequence * a.table_stride;
    for (int64_t token = start; token < stop;) {
        const int64_t index = token / a.page_items;
        const int64_t page_stop = (index + 1) * a.page_items;
        const int64_t end = page_stop < stop ? page_stop : stop;
        body(token - index * a.page_items, end - token, (int64_t)table[index], token - start);
        token = end;
    }
}

// The next pages lie anywhere, so no prefetcher finds them.
template <typename C>
INLINE void prefetch(const C* items, int64_t count) {
    const char* bytes = reinterpret_cast<const char*>(items);
    const char* end = reinterpret_cast<const char*>(items + count);
    for (; bytes < end; bytes += 64) {
        __builtin_prefetch(bytes);
    }
}

// scores[count] of one query; keys [count, dim] one after the other.
template <typename C>
INLINE void score(const float* query, const C* keys, int64_t count, int64_t dim, float* scores) {
    int64_t token = 0;
    for (; token + kLanes <= count; token += kLanes) {
        Floats parts[kLanes] = {};
        for (int64_t d = 0; d < dim; d += kLanes) {
            const Floats q = load(query + d);
            for (int64_t i = 0; i < kLanes; ++i) {
                parts[i] += q * load(keys + (token + i) * dim + d);
            }
        }
        store(scores + token, sums(parts));
    }
    for (; token < count; ++token) {
        Floats part = {};
        for (int64_t d = 0; d < dim; d += kLanes) {
            part += load(query + d) * load(keys + token * dim + d);
        }
        scores[token] = sum(part);
    }
}

// Scores to weights that are not yet divided by their sum, which is returned. scores: [count], with
// room up to a whole number of lanes.
INLINE float weigh(float* scores, int64_t count) {
    for (int64_t i = count; i < padded(count); ++i) {
        scores[i] = -INFINITY;
    }
    Floats top = all(-INFINITY);
    for (int64_t i = 0; i < count; i += kLanes) {
        top = larger(load(scores + i), top);
    }
    float largest = top[0];
    for (int64_t i = 1; i < kLanes; ++i) {
        largest = top[i] > largest ? top[i] : largest;
    }
    Floats total = {};
    for (int64_t i = 0; i < count; i += kLanes) {
        const Floats weights = exponential(load(scores + i) - largest);
        store(scores + i, weights);
        total += weights;
    }
    return sum(total);
}

// Channels first .. first + 8 kVectors of kQueries outputs: the values by their weights. The sums
// stay in registers over all pages.
template <int kQueries, int kVectors, typename Q, typename C>
INLINE void mix(const Attend& a, int64_t sequence, const C* values, int64_t first,
                const float* weights, int64_t weights_stride, const float* totals, Q* output) {
    Floats mixed[kQueries][kVectors] = {};
    each_page(a, sequence, [&](int64_t item, int64_t count, int64_t page, int64_t number) {
        const C* value = values + page * a.page_stride + item * a.dim + first;
        for (int64_t token = 0; token < count; ++token, value += a.dim) {
            Floats parts[kVectors];
            for (int v = 0; v < kVectors; ++v) {
                parts[v] = load(value + v * kLanes);
            }
            for (int q = 0; q < kQueries; ++q) {
                const float weight = weights[q * weights_stride + number + token];
                for (int v = 0; v < kVectors; ++v) {
                    mixed[q][v] += weight * parts[v];
                }
            }
        }
    });
    for (int q = 0; q < kQueries; ++q) {
        for (int v = 0; v < kVectors; ++v) {
            store(output + q * a.dim + first + v * kLanes, mixed[q][v] / totals[q]);
        }
    }
}

template <int kQueries, int kVectors, typename Q, typename C>
INLINE void mix_all(const Attend& a, int64_t sequence, const C* values, const float* weights,
                    int64_t weights_stride, const float* totals, Q* output) {
    int64_t d = 0;
    for (; d + kVectors * kLanes <= a.dim; d += kVectors * kLanes) {
        mix<kQueries, kVectors>(a, sequence, values, d, weights, weights_stride, totals, output);
    }
    for (; d < a.dim; d += kLanes) {
        mix<kQueries, 1>(a, sequence, values, d, weights, weights_stride, totals, output);
    }
}

template <typename Q, typename C>
void attend_as(const Attend& a, int64_t sequence, int64_t head, float* scratch) {
    const int64_t length = a.lengths[sequence];
    const int64_t seen = a.window && a.window < length ? a.window : length;
    const int64_t stride = padded(seen);
    const int64_t offset = head * a.group * a.dim;
    const Q* query = static_cast<const Q*>(a.query) + a.rows[sequence] * a.query_stride + offset;
    Q* output = static_cast<Q*>(a.output) + a.rows[sequence] * a.output_stride + offset;
    const C* keys = static_cast<const C*>(a.keys) + head * a.head_stride;
    const C* values = static_cast<const C*>(a.values) + head * a.head_stride;
    float* weights = scratch;
    float* scaled = scratch + a.group * stride;
    for (int64_t i = 0; i < a.group * a.dim; i += kLanes) {
        store(scaled + i, load(query + i) * a.scale);
    }
    const int32_t* table = a.page_table + sequence * a.table_stride;
    const int64_t last_index = (length - 1) / a.page_items;
    const int64_t page_elements = a.page_items * a.dim;
    each_page(a, sequence, [&](int64_t item, int64_t count, int64_t page, int64_t number) {
        const int64_t index = (length - seen + number) / a.page_items;
        if (index < last_index) {
            prefetch(keys + table[index + 1] * a.page_stride, page_elements);
        }
        prefetch(values + page * a.page_stride, page_elements);
        const C* key = keys + page * a.page_stride + item * a.dim;
        for (int64_t q = 0; q < a.group; ++q) {
            score(scaled + q * a.dim, key, count, a.dim, weights + q * stride + number);
        }
    });
    // As many queries at a time as leave about eight sums in registers.
    for (int64_t q = 0; q < a.group;) {
        float totals[4];
        const int64_t left = a.group - q;
        const int64_t taken = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        float* taken_weights = weights + q * stride;
        for (int64_t i = 0; i < taken; ++i) {
            totals[i] = weigh(taken_weights + i * stride, seen);
        }
        Q* taken_output = output + q * a.dim;
        if (taken == 4) {
            mix_all<4, 2>(a, sequence, values, taken_weights, stride, totals, taken_output);
        } else if (taken == 2) {
            mix_all<2, 4>(a, sequence, values, taken_weights, stride, totals, taken_output);
        } else {
            mix_all<1, 8>(a, sequence, values, taken_weights, stride, totals, taken_output);
        }
        q += taken;
    }
}

void attend(const Attend& a, int64_t sequence, int64_t head, float* scratch) {
    const bool is_wide = a.cache_element == Element::float32;
    if (a.query_element == Element::float32) {
        is_wide ? attend_as<float, float>(a, sequence, head, scratch)
                : attend_as<float, uint16_t>(a, sequence, head, scratch);
    } else {
        is_wide ? attend_as<uint16_t, float>(a, sequence, head, scratch)
                : attend_as<uint16_t, uint16_t>(a, sequence, head, scratch);
    }
}

// ---- rows ---------------------------------------------------------------------------------------

void rms_norm(const RmsNorm& norm, int64_t row) {
    const Heads& h = norm.heads;
    for (int64_t head = 0; head < h.head_count; ++head) {
        const float* x = h.x + row * h.row_stride + head * h.dim;
        float* output = h.output + (row * h.head_count + head) * h.dim;
        const float* weight = norm.weight + head * norm.weight_stride;
        // In double: an error here is one of the whole row, and recurrent models enlarge it.
        Doubles squares = {};
        for (int64_t d = 0; d < h.dim; d += kLanes) {
            const Doubles values = __builtin_convertvector(load(x + d), Doubles);
            squares += values * values;
        }
        double total = 0.0;
        for (int64_t i = 0; i < kLanes; ++i) {
            total += squares[i];
        }
        const double mean = total / static_cast<double>(h.dim);
        const float factor = static_cast<float>(1.0 / __builtin_sqrt(mean + norm.epsilon));
        for (int64_t d = 0; d < h.dim; d += kLanes) {
            const Floats values = load(x + d) * factor;
            store(output + d, norm.weight ? values * load(weight + d) : values);
        }
    }
}

void rotate(const Rotate& turn, int64_t row) {
    const Heads& h = turn.heads;
    const float* cos = turn.cos + row * h.dim;
    const float* sin = turn.sin + row * h.dim;
    const int64_t half = h.dim / 2;
    for (int64_t head = 0; head < h.head_count; ++head) {
        const float* x = h.x + row * h.row_stride + head * h.dim;
        float* output = h.output + (row * h.head_count + head) * h.dim;
        for (int64_t d = 0; d < half; d += kLanes) {
            const Floats first = load(x + d), second = load(x + half + d);
            store(output + d, first * load(cos + d) + second * load(sin + d));
            store(output + half + d, second * load(cos + half + d) + first * load(sin + half + d));
        }
    }
}

void gated_silu(const GatedSilu& gated, int64_t row) {
    const float* gate = gated.x + 2 * row * gated.size;
    const float* up = gate + gated.size;
    float* output = gated.output + row * gated.size;
    for (int64_t d = 0; d < gated.size; d += kLanes) {
        const Floats x = load(gate + d);
        store(output + d, x / (1.0f + exponential(-x)) * load(up + d));
    }
}

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {attend, rms_norm, rotate, gated_silu};

}  // namespace baton::BATON_ISA
