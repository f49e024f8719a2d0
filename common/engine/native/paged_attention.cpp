// Shares the work of one layer among OpenMP's threads, which are torch's.
#include "paged_attention.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <vector>

namespace baton {

namespace {

// Elements of a sequence from which on its rows are written by several threads.
constexpr int64_t SHARED_ELEMENTS_MIN = 1 << 16;

std::vector<AttentionTask> share(const AttentionShape& shape, const AttentionBatch& batch) {
    const int64_t group = shape.head_count / shape.kv_head_count;
    const int64_t tile_tokens = std::max<int64_t>(1, TILE_ROWS / group);
    std::vector<AttentionTask> tasks;
    for (int32_t sequence = 0; sequence < batch.sequence_count; ++sequence) {
        const int64_t count = batch.starts[sequence + 1] - batch.starts[sequence];
        const int64_t step = count <= ROW_TOKENS_MAX ? count : tile_tokens;
        for (int64_t first = 0; first < count; first += step) {
            const int64_t last = std::min(count, first + step);
            for (int32_t head = 0; head < shape.kv_head_count; ++head) {
                tasks.push_back({sequence, head, static_cast<int32_t>(first), static_cast<int32_t>(last)});
            }
        }
    }
    return tasks;
}

template <typename Element>
void run(const AttentionShape& shape, const AttentionBatch& batch, const AttentionMemory<Element>& memory,
         const AttentionTask& task) {
    const int64_t start = batch.starts[task.sequence];
    const int64_t count = batch.starts[task.sequence + 1] - start;
    const AttentionView<Element> view{
        shape, memory, batch.tables[task.sequence], start, batch.lengths[task.sequence] - count,
        task};
    if (count <= ROW_TOKENS_MAX) {
        attend_rows(view);
    } else {
        attend_tile(view);
    }
}

}  // namespace

template <typename Element>
void write_rows(const AttentionShape& shape, const AttentionBatch& batch, Element* cache,
                const NewRows<Element>& rows) {
    const int64_t token_elements = shape.kv_head_count * shape.head_dim;
    for (int64_t sequence = 0; sequence < batch.sequence_count; ++sequence) {
        const int32_t* pages = batch.tables[sequence];
        const int64_t start = batch.starts[sequence], count = batch.starts[sequence + 1] - start;
        const int64_t position = batch.lengths[sequence] - count;
#pragma omp parallel for if (count * token_elements >= SHARED_ELEMENTS_MIN)
        for (int64_t token = 0; token < count; ++token) {
            const int64_t item = position + token;
            Element* to = cache + pages[item / shape.page_items] * shape.page_stride +
                          item % shape.page_items * shape.head_dim;
            const Element* from = rows.memory + (start + token) * rows.row_stride;
            for (int64_t head = 0; head < shape.kv_head_count; ++head) {
                std::memcpy(to + head * shape.unit_stride, from + head * rows.head_stride,
                            shape.head_dim * sizeof(Element));
            }
        }
    }
}

template <typename Element>
void attend(const AttentionShape& shape, const AttentionBatch& batch, const AttentionMemory<Element>& memory) {
    const std::vector<AttentionTask> tasks = share(shape, batch);
    const auto task_count = static_cast<int64_t>(tasks.size());
    // Nothing may leave a parallel region by an exception.
    std::exception_ptr failure;
    // The last tiles of a prompt see most, so they begin first.
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t index = task_count - 1; index >= 0; --index) {
        try {
            run(shape, batch, memory, tasks[index]);
        } catch (...) {
#pragma omp critical
            failure = std::current_exception();
        }
    }
    if (failure) std::rethrow_exception(failure);
}

template void write_rows<float>(const AttentionShape&, const AttentionBatch&, float*, const NewRows<float>&);
template void write_rows<bfloat16>(const AttentionShape&, const AttentionBatch&, bfloat16*, const NewRows<bfloat16>&);
template void attend<float>(const AttentionShape&, const AttentionBatch&, const AttentionMemory<float>&);
template void attend<bfloat16>(const AttentionShape&, const AttentionBatch&, const AttentionMemory<bfloat16>&);

}  // namespace baton
