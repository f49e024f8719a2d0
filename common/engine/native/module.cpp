// The Python module: addresses in, the fastest kernels that this CPU has, rows over threads.
//
// Addresses come as integers, because a tensor's way through DLPack costs more than some of these
// kernels. Whoever calls (common/engine/cpu_kernels.py) has checked shapes, dtypes and strides.
//
// Threads are those of torch's OpenMP runtime: the module is compiled with OpenMP and linked without,
// so that its symbols are those of the library that torch has loaded, and one pool serves both.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <vector>

#include "kernels.hpp"

namespace nb = nanobind;
using namespace baton;

namespace {

// Below this many elements a thread that has to be woken costs more than it saves; torch's own grain.
constexpr int64_t kGrainCount = 32768;

const Kernels& fastest() {
#ifdef BATON_HAS_AVX2
    static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return has_avx2 ? avx2::kernels : baseline::kernels;
#else
    return baseline::kernels;
#endif
}

int threads_for(int64_t element_count, int thread_count) {
    const int64_t useful = element_count / kGrainCount;
    return useful < 2 ? 1 : useful < thread_count ? static_cast<int>(useful) : thread_count;
}

template <typename T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

Element element(bool is_bfloat16) { return is_bfloat16 ? Element::bfloat16 : Element::float32; }

void attend(uintptr_t output, int64_t output_stride, uintptr_t query, int64_t query_stride,
            uintptr_t keys, uintptr_t values, int64_t page_stride, int64_t head_stride,
            uintptr_t page_table, int64_t table_stride, uintptr_t rows, uintptr_t lengths,
            int64_t sequence_count, int64_t head_count, int64_t group, int64_t dim,
            int64_t page_items, int64_t window, float scale, bool is_query_bfloat16,
            bool is_cache_bfloat16, int thread_count) {
    const Attend a{at<const void>(query), at<void>(output),
                   at<const void>(keys), at<const void>(values),
                   at<const int32_t>(page_table), at<const int64_t>(rows),
                   at<const int32_t>(lengths), query_stride, output_stride, page_stride,
                   head_stride, table_stride, head_count, group, dim, page_items, window, scale,
                   element(is_query_bfloat16), element(is_cache_bfloat16)};
    int64_t longest = 0, total = 0;
    for (int64_t i = 0; i < sequence_count; ++i) {
        longest = a.lengths[i] > longest ? a.lengths[i] : longest;
        total += a.lengths[i];
    }
    const int64_t pair_count = sequence_count * head_count;
    const int64_t scratch_count = attend_scratch_count(a, longest);
    const Kernels& kernels = fastest();
    const int threads = threads_for(total * head_count * group * dim, thread_count);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        thread_local std::vector<float> scratch;
        if (scratch.size() < static_cast<size_t>(scratch_count)) {
            scratch.resize(scratch_count);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t pair = 0; pair < pair_count; ++pair) {
            kernels.attend(a, pair / head_count, pair % head_count, scratch.data());
        }
    }
}

template <typename Rows>
void over_rows(void (*kernel)(const Rows&, int64_t), const Rows& rows, int64_t row_count,
               int64_t row_elements, int thread_count) {
    const int threads = threads_for(row_count * row_elements, thread_count);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < row_count; ++row) {
        kernel(rows, row);
    }
}

void rms_norm(uintptr_t output, uintptr_t x, int64_t row_stride, uintptr_t weight,
              int64_t weight_stride, int64_t row_count, int64_t head_count, int64_t dim,
              float epsilon, int thread_count) {
    const RmsNorm norm{{at<const float>(x), at<float>(output), row_stride, head_count, dim},
                       at<const float>(weight), weight_stride, epsilon};
    over_rows(fastest().rms_norm, norm, row_count, head_count * dim, thread_count);
}

void rotate(uintptr_t output, uintptr_t x, int64_t row_stride, uintptr_t cos, uintptr_t sin,
            int64_t row_count, int64_t head_count, int64_t dim, int thread_count) {
    const Rotate turn{{at<const float>(x), at<float>(output), row_stride, head_count, dim},
                      at<const float>(cos), at<const float>(sin)};
    over_rows(fastest().rotate, turn, row_count, head_count * dim, thread_count);
}

void gated_silu(uintptr_t output, uintptr_t x, int64_t row_count, int64_t size, int thread_count) {
    const GatedSilu gated{at<const float>(x), at<float>(output), size};
    over_rows(fastest().gated_silu, gated, row_count, size, thread_count);
}

// Row t, unit u of values goes to page pages[t], row rows[t] of that unit's items. Strides in bytes.
void write_items(uintptr_t plane, int64_t page_stride, int64_t unit_stride, uintptr_t values,
                 int64_t value_stride, uintptr_t pages, uintptr_t rows, int64_t row_count,
                 int64_t unit_count, int64_t item_nbytes) {
    for (int64_t t = 0; t < row_count; ++t) {
        char* to = at<char>(plane) + at<const int64_t>(pages)[t] * page_stride +
                   at<const int64_t>(rows)[t] * item_nbytes;
        const char* from = at<const char>(values) + t * value_stride;
        for (int64_t unit = 0; unit < unit_count; ++unit) {
            std::memcpy(to + unit * unit_stride, from + unit * item_nbytes, item_nbytes);
        }
    }
}

}  // namespace

NB_MODULE(_kernels, m) {
    m.def("attend", &attend);
    m.def("rms_norm", &rms_norm);
    m.def("rotate", &rotate);
    m.def("gated_silu", &gated_silu);
    m.def("write_items", &write_items);
    m.def("instruction_set", [] { return &fastest() == &baseline::kernels ? "baseline" : "avx2"; });
}
