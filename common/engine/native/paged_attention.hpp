// Attention of new tokens to the pages of their sequences, on a CPU, and the writing of their keys and values there.
// Nothing is gathered.
//
// Sequences with many new tokens go in tiles, whose products are torch's (oneDNN's batch-reduce products, fp32
// results); those with few, in rows, which are bound by reading the cache. Knows nothing of torch's tensors.
#pragma once

#include <cstdint>

namespace baton {

struct bfloat16 {
    uint16_t bits;
};

// Sizes in elements. Item i of page p and KV head h is at p * page_stride + h * unit_stride + i * head_dim of
// keys and of values; query head h of row t at t * query_row_stride + h * query_head_stride.
struct AttentionShape {
    int64_t head_count, kv_head_count, head_dim;
    int64_t page_items, page_stride, unit_stride;
    int64_t query_row_stride, query_head_stride;
    int64_t window;  // tokens that are seen, itself included; 0 for all
    float scale;
    float softcap;  // 0 for none
};

// B sequences: rows starts[i] .. starts[i + 1] of queries are the last of lengths[i] tokens, whose pages are tables[i].
struct AttentionBatch {
    const int32_t* starts;
    const int32_t* lengths;
    const int32_t* const* tables;
    int64_t sequence_count;
};

template <typename Element>
struct AttentionMemory {
    Element* output;  // [rows, heads, head dim]
    const Element* query;
    const Element* keys;
    const Element* values;
    const float* sinks;  // [heads], null for none
};

// New keys or values of the batch's rows: head h of row t at t * row_stride + h * head_stride.
template <typename Element>
struct NewRows {
    const Element* memory;
    int64_t row_stride, head_stride;
};

// New tokens [first, last) of a sequence, for the query heads of one KV head.
struct AttentionTask {
    int32_t sequence, kv_head, first, last;
};

// What one task reads and writes, resolved: the rest knows no pages of other sequences.
template <typename Element>
struct AttentionView {
    const AttentionShape& shape;
    const AttentionMemory<Element>& memory;
    const int32_t* pages;
    int64_t row;       // of the first new token
    int64_t position;  // of it in its sequence
    AttentionTask task;

    int64_t group() const { return shape.head_count / shape.kv_head_count; }
    int64_t token_count() const { return task.last - task.first; }
    // Positions [begin, end) that any of the task's tokens sees.
    int64_t end() const { return position + task.last; }
    int64_t first_seen(int64_t token) const {
        const int64_t begin = shape.window == 0 ? 0 : position + task.first + token + 1 - shape.window;
        return begin < 0 ? 0 : begin;
    }
    int64_t place(int64_t item) const {
        const int64_t page = pages[item / shape.page_items];
        return page * shape.page_stride + task.kv_head * shape.unit_stride +
               item % shape.page_items * shape.head_dim;
    }
    int64_t query_place(int64_t head, int64_t token) const {
        return (row + task.first + token) * shape.query_row_stride +
               (task.kv_head * group() + head) * shape.query_head_stride;
    }
    int64_t output_place(int64_t head, int64_t token) const {
        return ((row + task.first + token) * shape.head_count + task.kv_head * group() + head) * shape.head_dim;
    }
    // What a query head's weights add up to besides those of its items, given its largest score.
    float sink(int64_t head) const {
        return memory.sinks == nullptr ? 0.0f : memory.sinks[task.kv_head * group() + head];
    }
};

// New tokens of a sequence up to which rows are faster than tiles.
constexpr int64_t ROW_TOKENS_MAX = 8;
constexpr int64_t BLOCK = 64;  // items that are weighed at once
constexpr int64_t TILE_BLOCK = 128;  // the same, in tiles
constexpr int64_t TILE_ROWS = 256;  // of queries
constexpr int64_t HEAD_DIM_MAX = 512;

// Puts new rows where keys or values of their tokens belong.
template <typename Element>
void write_rows(const AttentionShape& shape, const AttentionBatch& batch, Element* cache, const NewRows<Element>& rows);

template <typename Element>
void attend(const AttentionShape& shape, const AttentionBatch& batch, const AttentionMemory<Element>& memory);

template <typename Element>
void attend_rows(const AttentionView<Element>& view);

template <typename Element>
void attend_tile(const AttentionView<Element>& view);

// Why tiles can't be computed with the torch of this process; null if they can. Throws what torch throws.
const char* find_products();

}  // namespace baton
