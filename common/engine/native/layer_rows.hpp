// The small functions of a layer, row by row, on a CPU: in torch each is several passes over its rows, and each pass
// takes microseconds whatever it computes. Rows are shared among OpenMP's threads where there are many.
//
// Sizes and strides in elements; the elements of a row, or of a head, are side by side. Rows of an output are without
// gaps. Everything is computed in fp32, and rounded where torch's spelling rounds.
#pragma once

#include <cstdint>

#include "paged_attention.hpp"

namespace baton {

constexpr int64_t TURNED_DIM_MAX = 1024;  // of a head that is turned

template <typename Element>
struct Norm {
    const Element* weight;
    float epsilon;
    bool is_offset;  // scaled by 1 + weight in fp32, and rounded once; or else rounded before it is scaled
};

// x / rms(x) * weight. added: null, or rows without gaps that are added to x first, in its memory.
template <typename Element>
void norm_rows(Element* x, int64_t stride, const Element* added, Element* output, int64_t count, int64_t size,
               const Norm<Element>& norm);

enum class Gate { silu, gelu_tanh };

// f(gate) * up of rows of `2 size`, the gate in the first half.
template <typename Element>
void gate_rows(const Element* x, int64_t stride, Element* output, int64_t count, int64_t size, Gate gate);

struct Heads {
    int64_t row_count, head_count, dim, row_stride, head_stride;
};

// Norms of heads, if weight [heads, dim] is not null, and then rotations: channels i and i + rotated / 2 of the first
// `rotated`, or 2 i and 2 i + 1 if they are interleaved, by angles [rows, rotated] of cosines and then sines.
template <typename Element>
void turn_heads(const Element* x, Element* output, const Heads& heads, const Norm<Element>& norm, const float* angles,
                int64_t rotated, bool is_interleaved);

}  // namespace baton
