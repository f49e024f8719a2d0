// The Python module of a layer's small functions on a CPU: argument checks and lock release. No decisions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "layer_rows.hpp"
#include "processor.hpp"

namespace nb = nanobind;
using namespace baton;

namespace {

std::string why_unusable() {
    const char* reason = why_no_vectors();
    return reason == nullptr ? "" : reason;
}

// Calls `run` with a null pointer to the elements of that name.
template <typename Run>
void with_elements(const std::string& dtype, Run run) {
    if (dtype == "float32") {
        run(static_cast<float*>(nullptr));
    } else if (dtype == "bfloat16") {
        run(static_cast<bfloat16*>(nullptr));
    } else {
        throw nb::value_error("dtype must be float32 or bfloat16");
    }
}

template <typename Element>
Element* at(uintptr_t address) {
    return reinterpret_cast<Element*>(address);
}

void norm(const std::string& dtype, uintptr_t x, int64_t stride, uintptr_t added, uintptr_t output, int64_t count,
               int64_t size, uintptr_t weight, float epsilon, bool is_offset) {
    with_elements(dtype, [&]<typename Element>(Element*) {
        const Norm<Element> rule{at<const Element>(weight), epsilon, is_offset};
        nb::gil_scoped_release release;
        baton::norm_rows(at<Element>(x), stride, at<const Element>(added), at<Element>(output), count, size, rule);
    });
}

void gate(const std::string& dtype, uintptr_t x, int64_t stride, uintptr_t output, int64_t count, int64_t size,
               bool is_gelu) {
    with_elements(dtype, [&]<typename Element>(Element*) {
        nb::gil_scoped_release release;
        baton::gate_rows(at<const Element>(x), stride, at<Element>(output), count, size,
                         is_gelu ? Gate::gelu_tanh : Gate::silu);
    });
}

void turn(const std::string& dtype, uintptr_t x, uintptr_t output, int64_t row_count, int64_t head_count,
                int64_t dim, int64_t row_stride, int64_t head_stride, uintptr_t weight, float epsilon, bool is_offset,
                uintptr_t angles, int64_t rotated, bool is_interleaved) {
    if (dim > TURNED_DIM_MAX || rotated > dim || rotated % 2 != 0) {
        throw nb::value_error("heads must have at most 1024 channels, of which an even number is turned");
    }
    with_elements(dtype, [&]<typename Element>(Element*) {
        const Heads heads{row_count, head_count, dim, row_stride, head_stride};
        const Norm<Element> rule{at<const Element>(weight), epsilon, is_offset};
        nb::gil_scoped_release release;
        baton::turn_heads(at<const Element>(x), at<Element>(output), heads, rule, at<const float>(angles), rotated,
                          is_interleaved);
    });
}

}  // namespace

// Addresses are of tensors of one element type, "float32" or "bfloat16", but angles, which are float32.
NB_MODULE(BATON_MODULE, module) {
    module.def("why_unusable", &why_unusable);
    module.def("norm_rows", &norm);
    module.def("gate_rows", &gate);
    module.def("turn_heads", &turn);
}
