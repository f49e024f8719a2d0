// The Python module of the streams: values in and out, and the interpreter's lock released. No decisions.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>

#include "../binding.hpp"
#include "engine.hpp"

namespace nb = nanobind;
using namespace baton;

namespace {

template <typename Array>
Array to_array(const nb::bytes& bytes) {
    Array array{};
    if (bytes.size() != array.size()) {
        throw nb::value_error("a target has an id of 16 bytes and a secret of 32");
    }
    std::copy_n(reinterpret_cast<const unsigned char*>(bytes.c_str()), array.size(), array.begin());
    return array;
}

// A view keeps its memory: bytes that Python can still reach never go away under it.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> view(const StreamEngine& engine, size_t index) {
    auto* region = new StreamRegion(engine.region(index));
    nb::capsule owner(region, [](void* held) noexcept { delete static_cast<StreamRegion*>(held); });
    return {reinterpret_cast<uint8_t*>(region->start), {region->nbytes}, owner};
}

}  // namespace

NB_MODULE(_stream, module) {
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;
    nb::exception<StreamError>(module, "StreamError", PyExc_RuntimeError);
    nb::exception<PlanOutOfBounds>(module, "PlanOutOfBoundsError", PyExc_ValueError);
    nb::class_<StreamEngine>(module, "Engine")
        .def("__init__",
             [](StreamEngine* engine, bool is_encrypted, size_t connection_count, double handshake_s, double stall_s,
                double keepalive_s, int spin_us, uint64_t rekey_nbytes) {
                 new (engine) StreamEngine({{handshake_s, stall_s, keepalive_s, spin_us, rekey_nbytes},
                                            is_encrypted,
                                            connection_count});
             },
             nb::arg("is_encrypted"), nb::arg("connection_count"), nb::arg("handshake_s"), nb::arg("stall_s"),
             nb::arg("keepalive_s"), nb::arg("spin_us"), nb::arg("rekey_nbytes"))
        .def("allocate", &StreamEngine::allocate, nb::arg("nbytes"), Unlocked())
        .def("enroll", &StreamEngine::enroll, nb::arg("address"), nb::arg("nbytes"), Unlocked())
        .def("address",
             [](const StreamEngine& engine, size_t index) {
                 return reinterpret_cast<uint64_t>(engine.region(index).start);
             },
             nb::arg("index"))
        .def("view", &view, nb::arg("index"))
        .def("listen", &StreamEngine::listen, nb::arg("host"), nb::arg("low"), nb::arg("high"), Unlocked())
        .def("open_target",
             [](StreamEngine& engine, const nb::bytes& id, const nb::bytes& secret,
                const std::vector<size_t>& regions) {
                 engine.open_target(to_array<TargetId>(id), to_array<Secret>(secret), regions);
             },
             nb::arg("id"), nb::arg("secret"), nb::arg("regions"))
        .def("close_target",
             [](StreamEngine& engine, const nb::bytes& id) {
                 const auto target = to_array<TargetId>(id);
                 nb::gil_scoped_release release;
                 engine.close_target(target);
             },
             nb::arg("id"))
        .def("connect",
             [](StreamEngine& engine, uint64_t id, const std::string& host, uint16_t port, const nb::bytes& target,
                const nb::bytes& secret, const std::vector<uint64_t>& regions) {
                 StreamAddress address{host, port, {to_array<TargetId>(target), to_array<Secret>(secret)}};
                 nb::gil_scoped_release release;
                 engine.connect(id, std::move(address), regions);
             },
             nb::arg("id"), nb::arg("host"), nb::arg("port"), nb::arg("target"), nb::arg("secret"),
             nb::arg("regions"))
        .def("disconnect", &StreamEngine::disconnect, nb::arg("id"), Unlocked())
        .def("submit",
             [](StreamEngine& engine, uint64_t id, uint64_t tag, Int64Array source_region, Int64Array source_offset,
                Int64Array target_region, Int64Array target_offset, Int64Array nbytes) {
                 const PlanArrays plan = to_plan(source_region, source_offset, target_region, target_offset, nbytes);
                 nb::gil_scoped_release release;
                 engine.submit(id, tag, plan);
             },
             nb::arg("id"), nb::arg("tag"), nb::arg("source_region"), nb::arg("source_offset"),
             nb::arg("target_region"), nb::arg("target_offset"), nb::arg("nbytes"))
        .def("cancel", &StreamEngine::cancel, nb::arg("tag"), Unlocked())
        .def("drain", [](StreamEngine& engine) { return to_list(engine.drain()); })
        .def("wait", &StreamEngine::wait, nb::arg("timeout_s"), Unlocked())
        .def("fileno", &StreamEngine::fd)
        .def("incoming_counts", &StreamEngine::incoming_counts, Unlocked())
        .def("close", &StreamEngine::close, Unlocked());
}
