// Many new tokens: blocks of keys and values are packed as products want them, and multiplied by torch's products.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "paged_attention.hpp"
#include "simd.hpp"

namespace baton {

namespace {

// `at::native::cpublas::brgemm(M, N, K, lda, ldb, ldc, adds_to_c, A, B, C, is_vnni)` of torch's ATen/native/CPUBlas.h,
// fp32 results. B of bfloat16 has pairs of rows interleaved. Found by name, so that one build serves all releases.
using ProductFloat = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const float*, const float*,
                              float*, bool);
using ProductBfloat16 = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const bfloat16*,
                                 const bfloat16*, float*, bool);
ProductFloat product_float = nullptr;
ProductBfloat16 product_bfloat16 = nullptr;

void multiply(int64_t m, int64_t n, int64_t k, int64_t lda, bool adds, const float* a, const float* b, float* c) {
    product_float(m, n, k, lda, n, n, adds, a, b, c, false);
}

void multiply(int64_t m, int64_t n, int64_t k, int64_t lda, bool adds, const bfloat16* a, const bfloat16* b,
              float* c) {
    product_bfloat16(m, n, k, lda, n, n, adds, a, b, c, true);
}

template <typename Element>
struct Scratch {
    std::vector<Element> query, weights, keys, values;
    std::vector<float> scores, output, largest, sum;
    std::vector<const Element*> key_rows, value_rows;

    void fit(int64_t rows, int64_t dim) {
        query.resize(rows * dim);
        weights.resize(rows * TILE_BLOCK);
        keys.resize(TILE_BLOCK * dim);
        values.resize(TILE_BLOCK * dim);
        scores.resize(rows * TILE_BLOCK);
        output.resize(rows * dim);
        largest.resize(rows);
        sum.resize(rows);
        key_rows.resize(TILE_BLOCK);
        value_rows.resize(TILE_BLOCK);
    }
};

// Columns of words, which are floats or pairs of bfloat16: [words of a row][TILE_BLOCK].
template <typename Element>
void pack_keys(const std::vector<const Element*>& rows, int64_t dim, Element* to) {
    const int64_t word_count = dim * static_cast<int64_t>(sizeof(Element)) / 4;
    auto* words = reinterpret_cast<uint32_t*>(to);
    for (int64_t item = 0; item < TILE_BLOCK; item += 16) {
        const uint32_t* from[16];
        for (int row = 0; row < 16; ++row) from[row] = reinterpret_cast<const uint32_t*>(rows[item + row]);
        int64_t word = 0;
        for (; word + 16 <= word_count; word += 16) {
            transpose16(from, word, words + word * TILE_BLOCK + item, TILE_BLOCK);
        }
        for (; word < word_count; ++word)  // dims of bfloat16 are multiples of 16, so 8 words may be left
            for (int row = 0; row < 16; ++row) words[word * TILE_BLOCK + item + row] = from[row][word];
    }
}

void pack_values(const std::vector<const float*>& rows, int64_t dim, float* to) {
    for (int64_t item = 0; item < TILE_BLOCK; ++item) std::copy_n(rows[item], dim, to + item * dim);
}

void pack_values(const std::vector<const bfloat16*>& rows, int64_t dim, bfloat16* to) {
    for (int64_t item = 0; item < TILE_BLOCK; item += 2) {
        bfloat16* pair = to + item * dim;
        int64_t d = 0;
        for (; d + 32 <= dim; d += 32) interleave32(rows[item] + d, rows[item + 1] + d, pair + 2 * d);
        for (; d < dim; ++d) {
            pair[2 * d] = rows[item][d];
            pair[2 * d + 1] = rows[item + 1][d];
        }
    }
}

// Scores of one row of queries become weights. Items [seen_from, seen_to) of the block are seen. Returns by how much
// what was summed before shrinks.
template <typename Element>
float weigh(const AttentionShape& shape, const float* scores, int64_t seen_from, int64_t seen_to, Element* weights,
            float& largest, float& sum) {
    constexpr float none = -std::numeric_limits<float>::infinity();
    seen_from = std::clamp<int64_t>(seen_from, 0, TILE_BLOCK);
    seen_to = std::clamp<int64_t>(seen_to, 0, TILE_BLOCK);
    const __m512 scale = _mm512_set1_ps(shape.scale);
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 parts[TILE_BLOCK / 16], most = _mm512_set1_ps(none);
    for (int64_t item = 0; item < TILE_BLOCK; item += 16) {
        __m512 score = _mm512_mul_ps(load16(scores + item), scale);
        if (shape.softcap != 0.0f) score = softcap16(score, shape.softcap);
        if (item < seen_from || item + 16 > seen_to) {
            const __m512i numbers = _mm512_add_epi32(first, _mm512_set1_epi32(static_cast<int>(item)));
            const __mmask16 is_seen =
                _mm512_cmp_epi32_mask(numbers, _mm512_set1_epi32(static_cast<int>(seen_from)), _MM_CMPINT_NLT) &
                _mm512_cmp_epi32_mask(numbers, _mm512_set1_epi32(static_cast<int>(seen_to)), _MM_CMPINT_LT);
            score = _mm512_mask_mov_ps(_mm512_set1_ps(none), is_seen, score);
        }
        parts[item / 16] = score;
        most = _mm512_max_ps(most, score);
    }
    const float now = std::max(largest, _mm512_reduce_max_ps(most));
    const float shrink = now == largest ? 1.0f : std::exp(largest - now);
    const __m512 base = _mm512_set1_ps(std::isinf(now) ? 0.0f : now);
    __m512 added = _mm512_setzero_ps();
    for (int64_t item = 0; item < TILE_BLOCK; item += 16) {
        const __m512 weight = weight16(_mm512_sub_ps(parts[item / 16], base));
        store16(weights + item, weight);
        added = _mm512_add_ps(added, weight);
    }
    sum = sum * shrink + _mm512_reduce_add_ps(added);
    largest = now;
    return shrink;
}

}  // namespace

const char* find_products() {
    void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch == nullptr) return "libtorch_cpu.so is not loaded";
    product_float = reinterpret_cast<ProductFloat>(
        dlsym(torch, "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb"));
    product_bfloat16 = reinterpret_cast<ProductBfloat16>(
        dlsym(torch, "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"));
    if (product_float == nullptr || product_bfloat16 == nullptr) return "this torch has no at::native::cpublas::brgemm";
    return nullptr;
}

// Row r is query head r / tokens, token r % tokens of the task.
template <typename Element>
void attend_tile(const AttentionView<Element>& view) {
    static thread_local Scratch<Element> scratch;
    static const std::vector<Element> zeros(HEAD_DIM_MAX);
    const AttentionShape& shape = view.shape;
    const int64_t dim = shape.head_dim, tokens = view.token_count(), rows = view.group() * tokens;
    scratch.fit(rows, dim);
    const bool has_sinks = view.memory.sinks != nullptr;
    for (int64_t row = 0; row < rows; ++row) {
        const Element* from = view.memory.query + view.query_place(row / tokens, row % tokens);
        std::copy_n(from, dim, scratch.query.data() + row * dim);
        scratch.largest[row] = has_sinks ? view.sink(row / tokens) : -std::numeric_limits<float>::infinity();
        scratch.sum[row] = has_sinks ? 1.0f : 0.0f;
    }
    const int64_t begin = view.first_seen(0);
    for (int64_t start = begin; start < view.end(); start += TILE_BLOCK) {
        const int64_t count = std::min(TILE_BLOCK, view.end() - start);
        for (int64_t item = 0; item < TILE_BLOCK; ++item) {
            const int64_t place = item < count ? view.place(start + item) : 0;
            scratch.key_rows[item] = item < count ? view.memory.keys + place : zeros.data();
            scratch.value_rows[item] = item < count ? view.memory.values + place : zeros.data();
        }
        pack_keys(scratch.key_rows, dim, scratch.keys.data());
        multiply(rows, TILE_BLOCK, dim, dim, false, scratch.query.data(), scratch.keys.data(), scratch.scores.data());
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t token = row % tokens;
            const float shrink = weigh(
                shape, scratch.scores.data() + row * TILE_BLOCK, view.first_seen(token) - start,
                view.position + view.task.first + token + 1 - start, scratch.weights.data() + row * TILE_BLOCK,
                scratch.largest[row], scratch.sum[row]);
            if (shrink == 1.0f || start == begin) continue;
            float* mine = scratch.output.data() + row * dim;
            const __m512 factor = _mm512_set1_ps(shrink);
            for (int64_t d = 0; d < dim; d += 16) store16(mine + d, _mm512_mul_ps(load16(mine + d), factor));
        }
        pack_values(scratch.value_rows, dim, scratch.values.data());
        multiply(rows, dim, TILE_BLOCK, TILE_BLOCK, start != begin, scratch.weights.data(), scratch.values.data(),
                 scratch.output.data());
    }
    for (int64_t row = 0; row < rows; ++row) {
        Element* to = view.memory.output + view.output_place(row / tokens, row % tokens);
        const __m512 factor = _mm512_set1_ps(1.0f / scratch.sum[row]);
        for (int64_t d = 0; d < dim; d += 16) {
            store16(to + d, _mm512_mul_ps(load16(scratch.output.data() + row * dim + d), factor));
        }
    }
}

template void attend_tile<float>(const AttentionView<float>&);
template void attend_tile<bfloat16>(const AttentionView<bfloat16>&);

}  // namespace baton
