// What a CPU computes for which torch has no kernel, or one that is many times slower.
//
// Plain loops over memory that the caller describes; they know nothing of Python, torch or threads.
// Strides are in elements. `kernels.cpp` is compiled once per instruction set, see `dispatch.cpp`.
#pragma once

#include <cstddef>
#include <cstdint>

namespace baton {

enum class Element { float32, bfloat16 };

// One new token of each sequence, attending to what a cache holds of it.
//
//   query, output   [row, KV head, group, dim]: `group` query heads read one KV head
//   keys, values    [page, KV head, item, dim], items of a page one after the other
//   page_table      [sequence, page index]; page_items tokens to a page
//   rows            the row of each sequence in query and output
//   lengths         tokens of each sequence in the cache, the new one included
//   window          how many of them are seen, the last ones; 0 for all
struct Attend {
    const void* query;
    void* output;
    const void* keys;
    const void* values;
    const int32_t* page_table;
    const int64_t* rows;
    const int32_t* lengths;
    int64_t query_stride, output_stride;  // of a row
    int64_t page_stride, head_stride;     // of keys and values
    int64_t table_stride;
    int64_t head_count, group, dim, page_items, window;
    float scale;
    Element query_element, cache_element;
};

// x [row, head, dim] in fp32; heads of a row one after the other, rows apart by `row_stride`.
struct Heads {
    const float* x;
    float* output;  // contiguous
    int64_t row_stride, head_count, dim;
};

// rms_norm of every head. weight: [head, dim], or [dim] if weight_stride is 0; null for none.
struct RmsNorm {
    Heads heads;
    const float* weight;
    int64_t weight_stride;
    float epsilon;
};

// x * cos + swap_halves(x) * sin; cos, sin: [row, dim].
struct Rotate {
    Heads heads;
    const float* cos;
    const float* sin;
};

// silu(gate) * up of x [row, 2 size], the gate in the first half; output [row, size].
struct GatedSilu {
    const float* x;
    float* output;
    int64_t size;
};

struct Kernels {
    // All query heads of one KV head of one sequence. scratch: attend_scratch_count floats.
    void (*attend)(const Attend&, int64_t sequence, int64_t head, float* scratch);
    void (*rms_norm)(const RmsNorm&, int64_t row);
    void (*rotate)(const Rotate&, int64_t row);
    void (*gated_silu)(const GatedSilu&, int64_t row);
};

constexpr int64_t kLanes = 8;  // dim and size are multiples of it

static inline int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

static inline int64_t attend_scratch_count(const Attend& a, int64_t length) {
    return a.group * (padded(length) + a.dim);
}

namespace baseline {
extern const Kernels kernels;
}
#ifdef BATON_HAS_AVX2
namespace avx2 {
extern const Kernels kernels;
}
#endif

}  // namespace baton
