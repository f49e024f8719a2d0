// The Python module of attention on a CPU: argument checks and lock release. No decisions.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <string>

#include "paged_attention.hpp"
#include "processor.hpp"

namespace nb = nanobind;
using namespace baton;

namespace {

using Int32Vector = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int32Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::string why_unusable() {
    if (const char* reason = why_no_vectors()) return reason;
    const char* reason = find_products();
    return reason == nullptr ? "" : reason;
}

// The batch of one pass and page group, kept by the caller's arrays.
class Batch {
   public:
    Batch(Int32Vector starts, Int32Vector lengths, Int32Table tables, int64_t page_items, int64_t page_count)
        : starts_(starts), lengths_(lengths), tables_(tables), page_items_(page_items) {
        const auto count = static_cast<int64_t>(lengths.size());
        if (static_cast<int64_t>(starts.size()) != count + 1 || static_cast<int64_t>(tables.shape(0)) != count) {
            throw nb::value_error("starts, lengths and tables must be of one number of sequences");
        }
        for (int64_t i = 0; i < count; ++i) {
            const int64_t fresh = starts.data()[i + 1] - starts.data()[i];
            const int64_t pages = (lengths.data()[i] + page_items - 1) / page_items;
            if (fresh < 1 || fresh > lengths.data()[i] || pages > static_cast<int64_t>(tables.shape(1))) {
                throw nb::value_error(("sequence " + std::to_string(i) + " has no place for its tokens").c_str());
            }
            for (int64_t page = 0; page < pages; ++page) {
                const int32_t id = tables.data()[i * tables.shape(1) + page];
                if (id < 0 || id >= page_count) throw nb::value_error("a page id is outside the pool");
            }
        }
    }

    // Addresses are of tensors of one element type, "float32" or "bfloat16"; sinks is 0 or of float32[heads].
    void attend(const std::string& dtype, uintptr_t output, uintptr_t query, uintptr_t keys, uintptr_t values,
                uintptr_t sinks, int64_t head_count, int64_t kv_head_count, int64_t head_dim, int64_t page_stride,
                int64_t unit_stride, int64_t query_row_stride, int64_t query_head_stride, int64_t window, float scale,
                float softcap) const {
        if (head_dim < 16 || head_dim > HEAD_DIM_MAX || head_dim % 16 != 0 || kv_head_count < 1 ||
            head_count % kv_head_count != 0) {
            throw nb::value_error("head_dim must be a multiple of 16 up to 512, and heads whole groups of KV heads");
        }
        const AttentionShape shape{head_count,  kv_head_count,    head_dim,          page_items_, page_stride,
                                   unit_stride, query_row_stride, query_head_stride, window,      scale,
                                   softcap};
        const AttentionBatch batch{starts_.data(), lengths_.data(), tables_.data(),
                                   static_cast<int64_t>(lengths_.size()), static_cast<int64_t>(tables_.shape(1))};
        if (dtype == "float32") {
            run<float>(shape, batch, output, query, keys, values, sinks);
        } else if (dtype == "bfloat16") {
            run<bfloat16>(shape, batch, output, query, keys, values, sinks);
        } else {
            throw nb::value_error("dtype must be float32 or bfloat16");
        }
    }

   private:
    template <typename Element>
    static void run(const AttentionShape& shape, const AttentionBatch& batch, uintptr_t output, uintptr_t query,
                    uintptr_t keys, uintptr_t values, uintptr_t sinks) {
        const AttentionMemory<Element> memory{
            reinterpret_cast<Element*>(output), reinterpret_cast<const Element*>(query),
            reinterpret_cast<const Element*>(keys), reinterpret_cast<const Element*>(values),
            reinterpret_cast<const float*>(sinks)};
        nb::gil_scoped_release release;
        baton::attend<Element>(shape, batch, memory);
    }

    Int32Vector starts_, lengths_;
    Int32Table tables_;
    int64_t page_items_;
};

}  // namespace

NB_MODULE(_attention, module) {
    module.def("why_unusable", &why_unusable);
    nb::class_<Batch>(module, "Batch")
        .def(nb::init<Int32Vector, Int32Vector, Int32Table, int64_t, int64_t>(), nb::arg("starts"), nb::arg("lengths"),
             nb::arg("tables"), nb::arg("page_items"), nb::arg("page_count"))
        .def("attend", &Batch::attend, nb::arg("dtype"), nb::arg("output"), nb::arg("query"), nb::arg("keys"),
             nb::arg("values"), nb::arg("sinks"), nb::arg("head_count"), nb::arg("kv_head_count"), nb::arg("head_dim"),
             nb::arg("page_stride"), nb::arg("unit_stride"), nb::arg("query_row_stride"),
             nb::arg("query_head_stride"), nb::arg("window"), nb::arg("scale"), nb::arg("softcap"));
}
