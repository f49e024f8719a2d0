// Few new tokens: each cached row is read once, and weighed for all rows of queries that share it.
#include <algorithm>
#include <cmath>
#include <limits>

#include "paged_attention.hpp"
#include "simd.hpp"

namespace baton {

namespace {

constexpr int64_t ROWS = 4;       // of queries, in registers at once
constexpr int64_t COLUMNS = 64;  // of an output row, likewise

// scores[row][item] of a block. query: fp32[rows][dim].
template <typename Element, int COUNT>
void score_block(const float* query, int64_t dim, const Element* const* keys, int64_t item_count, float* scores) {
    for (int64_t item = 0; item < item_count; ++item) {
        __m512 sums[COUNT];
        for (int row = 0; row < COUNT; ++row) sums[row] = _mm512_setzero_ps();
        for (int64_t d = 0; d < dim; d += 16) {
            const __m512 key = load16(keys[item] + d);
            for (int row = 0; row < COUNT; ++row) {
                sums[row] = _mm512_fmadd_ps(load16(query + row * dim + d), key, sums[row]);
            }
        }
        for (int row = 0; row < COUNT; ++row) scores[row * BLOCK + item] = _mm512_reduce_add_ps(sums[row]);
    }
}

// output[row][0 .. 16 * PARTS) += sum over items of weights[row][item] * values[item].
template <typename Element, int COUNT, int PARTS>
void add_values(const float* weights, const Element* const* values, int64_t column, int64_t item_count, float* output,
                int64_t dim) {
    __m512 sums[COUNT][PARTS];
    for (int row = 0; row < COUNT; ++row)
        for (int part = 0; part < PARTS; ++part) sums[row][part] = load16(output + row * dim + column + part * 16);
    for (int64_t item = 0; item < item_count; ++item) {
        __m512 value[PARTS];
        for (int part = 0; part < PARTS; ++part) value[part] = load16(values[item] + column + part * 16);
        for (int row = 0; row < COUNT; ++row) {
            const __m512 weight = _mm512_set1_ps(weights[row * BLOCK + item]);
            for (int part = 0; part < PARTS; ++part) {
                sums[row][part] = _mm512_fmadd_ps(weight, value[part], sums[row][part]);
            }
        }
    }
    for (int row = 0; row < COUNT; ++row)
        for (int part = 0; part < PARTS; ++part) store16(output + row * dim + column + part * 16, sums[row][part]);
}

template <typename Element, int COUNT>
void add_block(const float* weights, const Element* const* values, int64_t item_count, float* output, int64_t dim) {
    int64_t column = 0;
    for (; column + COLUMNS <= dim; column += COLUMNS) {
        add_values<Element, COUNT, 4>(weights, values, column, item_count, output, dim);
    }
    for (; column < dim; column += 16) {
        add_values<Element, COUNT, 1>(weights, values, column, item_count, output, dim);
    }
}

// Up to ROWS rows of queries of one task; row r is query head r / tokens, token r % tokens of the task.
template <typename Element, int COUNT>
void attend_some(const AttentionView<Element>& view, int64_t first_row) {
    const AttentionShape& shape = view.shape;
    const int64_t dim = shape.head_dim, tokens = view.token_count();
    alignas(64) float query[COUNT * HEAD_DIM_MAX], output[COUNT * HEAD_DIM_MAX];
    alignas(64) float scores[COUNT * BLOCK];
    float largest[COUNT], sum[COUNT];
    int64_t begin = std::numeric_limits<int64_t>::max(), head[COUNT], token[COUNT];
    for (int row = 0; row < COUNT; ++row) {
        head[row] = (first_row + row) / tokens;
        token[row] = (first_row + row) % tokens;
        begin = std::min(begin, view.first_seen(token[row]));
        const Element* from = view.memory.query + view.query_place(head[row], token[row]);
        const __m512 scale = _mm512_set1_ps(shape.scale);
        for (int64_t d = 0; d < dim; d += 16) {
            store16(query + row * dim + d, _mm512_mul_ps(load16(from + d), scale));
            store16(output + row * dim + d, _mm512_setzero_ps());
        }
        const bool has_sink = view.memory.sinks != nullptr;
        largest[row] = has_sink ? view.sink(head[row]) : -std::numeric_limits<float>::infinity();
        sum[row] = has_sink ? 1.0f : 0.0f;
    }
    const Element *keys[BLOCK], *values[BLOCK];
    for (int64_t start = begin; start < view.end(); start += BLOCK) {
        const int64_t count = std::min(BLOCK, view.end() - start);
        for (int64_t item = 0; item < count; ++item) {
            const int64_t place = view.place(start + item);
            keys[item] = view.memory.keys + place;
            values[item] = view.memory.values + place;
        }
        score_block<Element, COUNT>(query, dim, keys, count, scores);
        for (int row = 0; row < COUNT; ++row) {
            float* mine = scores + row * BLOCK;
            const int64_t seen_from = std::max<int64_t>(0, view.first_seen(token[row]) - start);
            const int64_t seen_to = std::min(count, view.position + view.task.first + token[row] + 1 - start);
            const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
            __m512 most = none;
            for (int64_t item = 0; item < BLOCK; item += 16) {
                __m512 score = load16(mine + item);
                if (shape.softcap != 0.0f) score = softcap16(score, shape.softcap);
                const __m512i numbers = _mm512_add_epi32(
                    _mm512_set1_epi32(static_cast<int>(item)),
                    _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
                const __mmask16 is_seen =
                    _mm512_cmp_epi32_mask(numbers, _mm512_set1_epi32(static_cast<int>(std::min(seen_from, BLOCK))),
                                          _MM_CMPINT_NLT) &
                    _mm512_cmp_epi32_mask(numbers, _mm512_set1_epi32(static_cast<int>(std::max<int64_t>(seen_to, 0))),
                                          _MM_CMPINT_LT);
                score = _mm512_mask_mov_ps(none, is_seen, score);
                store16(mine + item, score);
                most = _mm512_max_ps(most, score);
            }
            const float now = std::max(largest[row], _mm512_reduce_max_ps(most));
            // Nothing is seen yet, so nothing is there to be scaled.
            const float shrink = now == largest[row] ? 1.0f : std::exp(largest[row] - now);
            const __m512 base = _mm512_set1_ps(std::isinf(now) ? 0.0f : now);
            __m512 added = _mm512_setzero_ps();
            for (int64_t item = 0; item < BLOCK; item += 16) {
                const __m512 weight = weight16(_mm512_sub_ps(load16(mine + item), base));
                store16(mine + item, weight);
                added = _mm512_add_ps(added, weight);
            }
            sum[row] = sum[row] * shrink + _mm512_reduce_add_ps(added);
            largest[row] = now;
            if (shrink != 1.0f) {
                const __m512 factor = _mm512_set1_ps(shrink);
                for (int64_t d = 0; d < dim; d += 16) {
                    store16(output + row * dim + d, _mm512_mul_ps(load16(output + row * dim + d), factor));
                }
            }
        }
        add_block<Element, COUNT>(scores, values, count, output, dim);
    }
    for (int row = 0; row < COUNT; ++row) {
        Element* to = view.memory.output + view.output_place(head[row], token[row]);
        const __m512 factor = _mm512_set1_ps(1.0f / sum[row]);
        for (int64_t d = 0; d < dim; d += 16) {
            store16(to + d, _mm512_mul_ps(load16(output + row * dim + d), factor));
        }
    }
}

}  // namespace

template <typename Element>
void attend_rows(const AttentionView<Element>& view) {
    const int64_t row_count = view.group() * view.token_count();
    int64_t row = 0;
    for (; row + ROWS <= row_count; row += ROWS) attend_some<Element, 4>(view, row);
    switch (row_count - row) {
        case 3: attend_some<Element, 3>(view, row); break;
        case 2: attend_some<Element, 2>(view, row); break;
        case 1: attend_some<Element, 1>(view, row); break;
        default: break;
    }
}

template void attend_rows<float>(const AttentionView<float>&);
template void attend_rows<bfloat16>(const AttentionView<bfloat16>&);

}  // namespace baton
