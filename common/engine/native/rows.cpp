// Few new tokens: each cached row is read once, and weighed for all rows of queries that share it.
#include <algorithm>
#include <cmath>
#include <limits>

#include "paged_attention.hpp"
#include "simd.hpp"

namespace baton {

namespace {

constexpr int64_t ROWS = 4;                 // of queries, in registers at once
constexpr int PARTS = LANES == 16 ? 4 : 2;  // of an output row, likewise, each a vector

// scores[row][item] of a block. query: fp32[rows][dim].
template <typename Element, int COUNT>
void score_block(const float* query, int64_t dim, const Element* const* keys, int64_t item_count, float* scores) {
    for (int64_t item = 0; item < item_count; ++item) {
        Floats sums[COUNT];
        for (int row = 0; row < COUNT; ++row) sums[row] = all(0.0f);
        for (int64_t d = 0; d < dim; d += LANES) {
            const Floats key = load(keys[item] + d);
            for (int row = 0; row < COUNT; ++row) {
                sums[row] = multiply_add(load(query + row * dim + d), key, sums[row]);
            }
        }
        for (int row = 0; row < COUNT; ++row) scores[row * BLOCK + item] = sum_of(sums[row]);
    }
}

// output[row][0 .. LANES * WIDTH) += sum over items of weights[row][item] * values[item].
template <typename Element, int COUNT, int WIDTH>
void add_values(const float* weights, const Element* const* values, int64_t column, int64_t item_count, float* output,
                int64_t dim) {
    Floats sums[COUNT][WIDTH];
    for (int row = 0; row < COUNT; ++row)
        for (int part = 0; part < WIDTH; ++part) sums[row][part] = load(output + row * dim + column + part * LANES);
    for (int64_t item = 0; item < item_count; ++item) {
        Floats value[WIDTH];
        for (int part = 0; part < WIDTH; ++part) value[part] = load(values[item] + column + part * LANES);
        for (int row = 0; row < COUNT; ++row) {
            const Floats weight = all(weights[row * BLOCK + item]);
            for (int part = 0; part < WIDTH; ++part) {
                sums[row][part] = multiply_add(weight, value[part], sums[row][part]);
            }
        }
    }
    for (int row = 0; row < COUNT; ++row)
        for (int part = 0; part < WIDTH; ++part) store(output + row * dim + column + part * LANES, sums[row][part]);
}

template <typename Element, int COUNT>
void add_block(const float* weights, const Element* const* values, int64_t item_count, float* output, int64_t dim) {
    int64_t column = 0;
    for (; column + PARTS * LANES <= dim; column += PARTS * LANES) {
        add_values<Element, COUNT, PARTS>(weights, values, column, item_count, output, dim);
    }
    for (; column < dim; column += LANES) {
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
        const Floats scale = all(shape.scale);
        for (int64_t d = 0; d < dim; d += LANES) {
            store(query + row * dim + d, load(from + d) * scale);
            store(output + row * dim + d, all(0.0f));
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
            const Floats none = all(-std::numeric_limits<float>::infinity());
            Floats most = none;
            for (int64_t item = 0; item < BLOCK; item += LANES) {
                Floats score = load(mine + item);
                if (shape.softcap != 0.0f) score = softcap_of(score, shape.softcap);
                score = keep_lanes(score, seen_from - item, seen_to - item, none);
                store(mine + item, score);
                most = larger(most, score);
            }
            const float now = std::max(largest[row], largest_of(most));
            // Nothing is seen yet, so nothing is there to be scaled.
            const float shrink = now == largest[row] ? 1.0f : std::exp(largest[row] - now);
            const Floats base = all(std::isinf(now) ? 0.0f : now);
            Floats added = all(0.0f);
            for (int64_t item = 0; item < BLOCK; item += LANES) {
                const Floats weight = weight_of(load(mine + item) - base);
                store(mine + item, weight);
                added = added + weight;
            }
            sum[row] = sum[row] * shrink + sum_of(added);
            largest[row] = now;
            if (shrink != 1.0f) {
                const Floats factor = all(shrink);
                for (int64_t d = 0; d < dim; d += LANES) {
                    store(output + row * dim + d, load(output + row * dim + d) * factor);
                }
            }
        }
        add_block<Element, COUNT>(scores, values, count, output, dim);
    }
    for (int row = 0; row < COUNT; ++row) {
        Element* to = view.memory.output + view.output_place(head[row], token[row]);
        const Floats factor = all(1.0f / sum[row]);
        for (int64_t d = 0; d < dim; d += LANES) {
            store(to + d, load(output + row * dim + d) * factor);
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
