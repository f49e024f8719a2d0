// Many new tokens: blocks of keys and values are packed as products want them, and multiplied by torch's products.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "paged_attention.hpp"
#include "simd.hpp"

namespace baton {

namespace {

// `at::native::cpublas::brgemm(M, N, K, lda, ldb, ldc, adds_to_c, A, B, C, is_vnni)` of torch's ATen/native/CPUBlas.h,
// fp32 results. B of bfloat16 has pairs of rows interleaved. Found by name, so that one build serves all releases.
using ProductFloat = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const float*, const float*,
                              float*, bool);
ProductFloat product_float = nullptr;

void multiply(int64_t m, int64_t n, int64_t k, int64_t lda, bool adds, const float* a, const float* b, float* c) {
    product_float(m, n, k, lda, n, n, adds, a, b, c, false);
}

#ifdef __AVX512BF16__
using ProductBfloat16 = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const bfloat16*,
                                 const bfloat16*, float*, bool);
ProductBfloat16 product_bfloat16 = nullptr;

void multiply(int64_t m, int64_t n, int64_t k, int64_t lda, bool adds, const bfloat16* a, const bfloat16* b,
              float* c) {
    product_bfloat16(m, n, k, lda, n, n, adds, a, b, c, true);
}
#endif

// What is multiplied: bfloat16 is made wide where there are no products of it.
template <typename Element>
using Factor = std::conditional_t<HAS_BFLOAT16_PRODUCTS, Element, float>;

template <typename Element>
struct Scratch {
    std::vector<Factor<Element>> query, weights, keys, values;
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

// Rows have whole vectors.
template <typename From, typename To>
void copy_row(const From* from, int64_t dim, To* to) {
    if constexpr (std::is_same_v<From, To>) {
        std::copy_n(from, dim, to);
    } else {
        for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(from + d));
    }
}

// Columns of words, which are floats or pairs of bfloat16: [words of a row][TILE_BLOCK].
template <typename Element>
void pack_columns(const Element* const* rows, int64_t dim, Element* to) {
    const int64_t word_count = dim * static_cast<int64_t>(sizeof(Element)) / 4;
    auto* words = reinterpret_cast<uint32_t*>(to);
    for (int64_t item = 0; item < TILE_BLOCK; item += LANES) {
        const uint32_t* from[LANES];
        for (int row = 0; row < LANES; ++row) from[row] = reinterpret_cast<const uint32_t*>(rows[item + row]);
        int64_t word = 0;
        for (; word + LANES <= word_count; word += LANES) {
            transpose(from, word, words + word * TILE_BLOCK + item, TILE_BLOCK);
        }
        for (; word < word_count; ++word)  // dims of bfloat16 are multiples of 16, so 8 words may be left
            for (int row = 0; row < LANES; ++row) words[word * TILE_BLOCK + item + row] = from[row][word];
    }
}

template <typename Element>
void pack_keys(const std::vector<const Element*>& rows, int64_t dim, Element* to) {
    pack_columns(rows.data(), dim, to);
}

template <typename Element>
void pack_values(const std::vector<const Element*>& rows, int64_t dim, float* to) {
    for (int64_t item = 0; item < TILE_BLOCK; ++item) copy_row(rows[item], dim, to + item * dim);
}

#ifdef __AVX512BF16__
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
#else
void pack_keys(const std::vector<const bfloat16*>& rows, int64_t dim, float* to) {
    static thread_local std::vector<float> wide;
    wide.resize(TILE_BLOCK * dim);
    const float* wide_rows[TILE_BLOCK];
    for (int64_t item = 0; item < TILE_BLOCK; ++item) {
        copy_row(rows[item], dim, wide.data() + item * dim);
        wide_rows[item] = wide.data() + item * dim;
    }
    pack_columns(wide_rows, dim, to);
}
#endif

// Scores of one row of queries become weights. Items [seen_from, seen_to) of the block are seen. Returns by how much
// what was summed before shrinks.
template <typename To>
float weigh(const AttentionShape& shape, const float* scores, int64_t seen_from, int64_t seen_to, To* weights,
            float& largest, float& sum) {
    constexpr float none = -std::numeric_limits<float>::infinity();
    const Floats scale = all(shape.scale), unseen = all(none);
    Floats parts[TILE_BLOCK / LANES], most = unseen;
    for (int64_t item = 0; item < TILE_BLOCK; item += LANES) {
        Floats score = load(scores + item) * scale;
        if (shape.softcap != 0.0f) score = softcap_of(score, shape.softcap);
        if (item < seen_from || item + LANES > seen_to) {
            score = keep_lanes(score, seen_from - item, seen_to - item, unseen);
        }
        parts[item / LANES] = score;
        most = larger(most, score);
    }
    const float now = std::max(largest, largest_of(most));
    const float shrink = now == largest ? 1.0f : std::exp(largest - now);
    const Floats base = all(std::isinf(now) ? 0.0f : now);
    Floats added = all(0.0f);
    for (int64_t item = 0; item < TILE_BLOCK; item += LANES) {
        const Floats weight = weight_of(parts[item / LANES] - base);
        store(weights + item, weight);
        added = added + weight;
    }
    sum = sum * shrink + sum_of(added);
    largest = now;
    return shrink;
}

}  // namespace

const char* find_products() {
    void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch == nullptr) return "libtorch_cpu.so is not loaded";
    product_float = reinterpret_cast<ProductFloat>(
        dlsym(torch, "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb"));
    bool has_all = product_float != nullptr;
#ifdef __AVX512BF16__
    product_bfloat16 = reinterpret_cast<ProductBfloat16>(
        dlsym(torch, "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"));
    has_all = has_all && product_bfloat16 != nullptr;
#endif
    return has_all ? nullptr : "this torch has no at::native::cpublas::brgemm";
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
        copy_row(from, dim, scratch.query.data() + row * dim);
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
            for (int64_t d = 0; d < dim; d += LANES) store(mine + d, load(mine + d) * all(shrink));
        }
        pack_values(scratch.value_rows, dim, scratch.values.data());
        multiply(rows, dim, TILE_BLOCK, TILE_BLOCK, start != begin, scratch.weights.data(), scratch.values.data(),
                 scratch.output.data());
    }
    for (int64_t row = 0; row < rows; ++row) {
        Element* to = view.memory.output + view.output_place(row / tokens, row % tokens);
        const float* mine = scratch.output.data() + row * dim;
        for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(mine + d) * all(1.0f / scratch.sum[row]));
    }
}

template void attend_tile<float>(const AttentionView<float>&);
template void attend_tile<bfloat16>(const AttentionView<bfloat16>&);

}  // namespace baton
