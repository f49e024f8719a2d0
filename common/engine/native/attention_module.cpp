// The Python module of attention on a CPU: argument checks and lock release. No decisions.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>
#include <vector>

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

// Keys and values of a layer, and the rule of its scores. Addresses are of memory of one element type, "float32" or
// "bfloat16", which stays; sinks is 0 or of float32[heads].
struct Layer {
    Layer(const std::string& dtype, uintptr_t keys, uintptr_t values, uintptr_t sinks, int64_t head_count,
          int64_t kv_head_count, int64_t head_dim, int64_t page_stride, int64_t unit_stride, int64_t window, float scale,
          float softcap)
        : is_float32(dtype == "float32"), keys(keys), values(values), sinks(sinks) {
        if (dtype != "float32" && dtype != "bfloat16") throw nb::value_error("dtype must be float32 or bfloat16");
        if (head_dim < 16 || head_dim > HEAD_DIM_MAX || head_dim % 16 != 0 || kv_head_count < 1 ||
            head_count % kv_head_count != 0) {
            throw nb::value_error("head_dim must be a multiple of 16 up to 512, and heads whole groups of KV heads");
        }
        shape = {head_count, kv_head_count, head_dim, 0, page_stride, unit_stride, 0, 0, window, scale, softcap};
    }

    bool is_float32;
    uintptr_t keys, values, sinks;
    AttentionShape shape;  // page_items and the strides of queries are those of a batch
};

// The batch of one pass and page group, kept by the caller's tables.
class Batch {
   public:
    Batch(Int32Vector starts, Int32Vector lengths, Int32Table tables, int64_t page_items, int64_t page_count)
        : tables_(tables), page_items_(page_items) {
        const auto count = static_cast<int64_t>(lengths.size());
        if (static_cast<int64_t>(starts.size()) != count + 1 || static_cast<int64_t>(tables.shape(0)) != count) {
            throw nb::value_error("starts, lengths and tables must be of one number of sequences");
        }
        for (int64_t i = 0; i < count; ++i) {
            const int64_t fresh = starts.data()[i + 1] - starts.data()[i];
            const int64_t pages = pages_of(lengths.data()[i]);
            const int32_t* table = tables.data() + i * tables.shape(1);
            if (fresh < 1 || fresh > lengths.data()[i] || pages > static_cast<int64_t>(tables.shape(1))) {
                throw nb::value_error(("sequence " + std::to_string(i) + " has no place for its tokens").c_str());
            }
            for (int64_t page = 0; page < pages; ++page) {
                if (table[page] < 0 || table[page] >= page_count) throw nb::value_error("a page id is outside the pool");
            }
            add(starts.data()[i], fresh, lengths.data()[i], table);
        }
        starts_.push_back(starts.data()[count]);
    }

    // Addresses are of tensors of the layer's element type, strides in elements. new_keys, new_values: rows that are
    // written to the cache first; both 0 if it has them.
    void attend(const Layer& layer, uintptr_t output, uintptr_t query, int64_t query_row_stride,
                int64_t query_head_stride, uintptr_t new_keys, int64_t key_row_stride, int64_t key_head_stride,
                uintptr_t new_values, int64_t value_row_stride, int64_t value_head_stride) const {
        AttentionShape shape = layer.shape;
        shape.page_items = page_items_;
        shape.query_row_stride = query_row_stride;
        shape.query_head_stride = query_head_stride;
        const auto run = [&]<typename Element>(Element*) {
            const NewRows<Element> key_rows{reinterpret_cast<const Element*>(new_keys), key_row_stride,
                                            key_head_stride};
            const NewRows<Element> value_rows{reinterpret_cast<const Element*>(new_values), value_row_stride,
                                              value_head_stride};
            run_layer(layer, shape, reinterpret_cast<Element*>(output), reinterpret_cast<const Element*>(query),
                      key_rows, value_rows);
        };
        if (layer.is_float32) {
            run(static_cast<float*>(nullptr));
        } else {
            run(static_cast<bfloat16*>(nullptr));
        }
    }

   private:
    int64_t pages_of(int64_t length) const { return (length + page_items_ - 1) / page_items_; }

    // One that goes on where the one before it ends, on the same pages, is its next token: proposals of a sequence come
    // that way, and its pages are read once for some of them.
    void add(int32_t start, int64_t fresh, int32_t length, const int32_t* table) {
        if (!lengths_.empty() && fresh == 1 && start - starts_.back() < ROW_TOKENS_MAX && length == lengths_.back() + 1 &&
            std::equal(table, table + pages_of(lengths_.back()), pages_.back())) {
            lengths_.back() = length;
            pages_.back() = table;
            return;
        }
        starts_.push_back(start);
        lengths_.push_back(length);
        pages_.push_back(table);
    }

    template <typename Element>
    void run_layer(const Layer& layer, const AttentionShape& shape, Element* output, const Element* query,
                   const NewRows<Element>& new_keys, const NewRows<Element>& new_values) const {
        const AttentionBatch batch{starts_.data(), lengths_.data(), pages_.data(),
                                   static_cast<int64_t>(lengths_.size())};
        auto* keys = reinterpret_cast<Element*>(layer.keys);
        auto* values = reinterpret_cast<Element*>(layer.values);
        const AttentionMemory<Element> memory{output, query, keys, values,
                                              reinterpret_cast<const float*>(layer.sinks)};
        nb::gil_scoped_release release;
        if (new_keys.memory != nullptr) {
            write_rows(shape, batch, keys, new_keys);
            write_rows(shape, batch, values, new_values);
        }
        baton::attend<Element>(shape, batch, memory);
    }

    std::vector<int32_t> starts_, lengths_;
    std::vector<const int32_t*> pages_;
    Int32Table tables_;
    int64_t page_items_;
};

}  // namespace

NB_MODULE(BATON_MODULE, module) {
    module.def("why_unusable", &why_unusable);
    nb::class_<Layer>(module, "Layer")
        .def(nb::init<const std::string&, uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                      int64_t, float, float>(),
             nb::arg("dtype"), nb::arg("keys"), nb::arg("values"), nb::arg("sinks"), nb::arg("head_count"),
             nb::arg("kv_head_count"), nb::arg("head_dim"), nb::arg("page_stride"), nb::arg("unit_stride"),
             nb::arg("window"), nb::arg("scale"), nb::arg("softcap"));
    nb::class_<Batch>(module, "Batch")
        .def(nb::init<Int32Vector, Int32Vector, Int32Table, int64_t, int64_t>(), nb::arg("starts"), nb::arg("lengths"),
             nb::arg("tables"), nb::arg("page_items"), nb::arg("page_count"))
        .def("attend", &Batch::attend, nb::arg("layer"), nb::arg("output"), nb::arg("query"),
             nb::arg("query_row_stride"), nb::arg("query_head_stride"), nb::arg("new_keys"), nb::arg("key_row_stride"),
             nb::arg("key_head_stride"), nb::arg("new_values"), nb::arg("value_row_stride"),
             nb::arg("value_head_stride"));
}
