// The Python module of copies within this process: argument checks and lock release. No decisions.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "binding.hpp"
#include "convert.hpp"
#include "copy.hpp"

namespace nb = nanobind;
using namespace baton;

namespace {

using ByteArray = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstByteArray = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using DigestArray = nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void copy_run_lists(ByteArray target, ByteArray source, Int64Array target_offsets,
                    Int64Array source_offsets, Int64Array nbytes) {
    nb::gil_scoped_release release;
    copy_runs(reinterpret_cast<char*>(target.data()), reinterpret_cast<const char*>(source.data()),
              target_offsets.data(), source_offsets.data(), nbytes.data(), nbytes.size());
}

// Page ids are whole numbers of pages from the start of a buffer on.
void check_pages(const char* name, const Int64Array& ids, size_t buffer_nbytes, int64_t page_nbytes) {
    for (size_t i = 0; i < ids.size(); ++i) {
        const int64_t id = ids.data()[i];
        if (page_nbytes < 1 || id < 0 || id >= static_cast<int64_t>(buffer_nbytes) / page_nbytes) {
            throw nb::value_error((std::string(name) + ": page " + std::to_string(id) + " is outside its buffer").c_str());
        }
    }
}

void digest_page_list(DigestArray digests, ConstByteArray buffer, Int64Array ids, int64_t page_nbytes) {
    check_pages("ids", ids, buffer.size(), page_nbytes);
    if (digests.size() != ids.size()) {
        throw nb::value_error("digests and ids must be of one length");
    }
    nb::gil_scoped_release release;
    for (size_t i = 0; i < ids.size(); ++i) {
        const auto* page = reinterpret_cast<const char*>(buffer.data()) + ids.data()[i] * page_nbytes;
        digests.data()[i] = digest_bytes(page, static_cast<size_t>(page_nbytes));
    }
}

void save_page_list(DigestArray digests, ByteArray target, ConstByteArray source, Int64Array target_ids,
                    Int64Array source_ids, int64_t page_nbytes, int64_t piece_nbytes, double pause_ratio) {
    check_pages("target_ids", target_ids, target.size(), page_nbytes);
    check_pages("source_ids", source_ids, source.size(), page_nbytes);
    if (digests.size() != target_ids.size() || source_ids.size() != target_ids.size() || piece_nbytes < 1) {
        throw nb::value_error("the three arrays must be of one length, and a piece of one byte at least");
    }
    nb::gil_scoped_release release;
    save_pages(reinterpret_cast<char*>(target.data()), reinterpret_cast<const char*>(source.data()), target_ids.data(),
               source_ids.data(), target_ids.size(), static_cast<size_t>(page_nbytes),
               static_cast<size_t>(piece_nbytes), pause_ratio, digests.data());
}

// Every run converts `counts[i]` elements; offsets are in bytes. `wide` is the type at the end that is not
// float8: "bfloat16" or "float32".
void convert_float8(ByteArray target, ByteArray source, Int64Array target_offsets, Int64Array source_offsets,
                    Int64Array counts, const std::string& wide, bool is_narrowing) {
    const int64_t wide_nbytes = wide == "bfloat16" ? 2 : wide == "float32" ? 4 : 0;
    const int64_t target_nbytes = is_narrowing ? 1 : wide_nbytes;
    const int64_t source_nbytes = is_narrowing ? wide_nbytes : 1;
    if (wide_nbytes == 0 || target_offsets.size() != counts.size() || source_offsets.size() != counts.size()) {
        throw nb::value_error("wide must be bfloat16 or float32, and the three arrays of one length");
    }
    for (size_t run = 0; run < counts.size(); ++run) {
        const int64_t count = counts.data()[run];
        const int64_t to = target_offsets.data()[run];
        const int64_t from = source_offsets.data()[run];
        if (count < 0 || to < 0 || from < 0 || to % target_nbytes != 0 || from % source_nbytes != 0 ||
            to + count * target_nbytes > static_cast<int64_t>(target.size()) ||
            from + count * source_nbytes > static_cast<int64_t>(source.size())) {
            throw nb::value_error(("run " + std::to_string(run) + " leaves its buffers or is not aligned").c_str());
        }
    }
    nb::gil_scoped_release release;
    for (size_t run = 0; run < counts.size(); ++run) {
        uint8_t* to = target.data() + target_offsets.data()[run];
        const uint8_t* from = source.data() + source_offsets.data()[run];
        const size_t count = static_cast<size_t>(counts.data()[run]);
        if (is_narrowing && wide_nbytes == 2) {
            narrow_bfloat16(to, reinterpret_cast<const uint16_t*>(from), count);
        } else if (is_narrowing) {
            narrow_float32(to, reinterpret_cast<const uint32_t*>(from), count);
        } else if (wide_nbytes == 2) {
            widen_bfloat16(reinterpret_cast<uint16_t*>(to), from, count);
        } else {
            widen_float32(reinterpret_cast<uint32_t*>(to), from, count);
        }
    }
}

}  // namespace

NB_MODULE(_copies, module) {
    module.def("copy_runs", &copy_run_lists, nb::arg("target"), nb::arg("source"),
               nb::arg("target_offsets"), nb::arg("source_offsets"), nb::arg("nbytes"));
    module.def("digest_pages", &digest_page_list, nb::arg("digests"), nb::arg("buffer"), nb::arg("ids"),
               nb::arg("page_nbytes"));
    module.def("save_pages", &save_page_list, nb::arg("digests"), nb::arg("target"), nb::arg("source"),
               nb::arg("target_ids"), nb::arg("source_ids"), nb::arg("page_nbytes"), nb::arg("piece_nbytes"),
               nb::arg("pause_ratio"));
    module.def("convert_float8", &convert_float8, nb::arg("target"), nb::arg("source"),
               nb::arg("target_offsets"), nb::arg("source_offsets"), nb::arg("counts"), nb::arg("wide"),
               nb::arg("is_narrowing"));
}
