// The Python module: argument checks, lock release, and values in and out. No decisions.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "binding.hpp"
#include "engine.hpp"

namespace nb = nanobind;
using namespace baton;

namespace {

using RegionTuple = std::tuple<uint64_t, uint64_t, nb::bytes>;  // address, nbytes, key

RemoteRegionSpec to_spec(const RegionTuple& region) {
    const nb::bytes& key = std::get<2>(region);
    return {std::get<0>(region), std::get<1>(region), std::string(key.c_str(), key.size())};
}

ucs_memory_type_t to_memory_type(const std::string& name) {
    if (name == "host") {
        return UCS_MEMORY_TYPE_HOST;
    }
    if (name == "cuda") {
        return UCS_MEMORY_TYPE_CUDA;
    }
    throw nb::value_error(("memory_type=" + name + ": must be 'host' or 'cuda'").c_str());
}

// A view keeps its memory registered: bytes that Python can still reach never go away under it.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> view(const Engine& engine, size_t index) {
    auto* memory = new std::shared_ptr<Memory>(engine.region(index));
    nb::capsule owner(memory, [](void* held) noexcept { delete static_cast<std::shared_ptr<Memory>*>(held); });
    return {reinterpret_cast<uint8_t*>((*memory)->address()), {(*memory)->nbytes()}, owner};
}

void bind_engine(nb::module_& module) {
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Engine>(module, "Engine")
        .def("__init__",
             [](Engine* engine, std::string tls, std::string net_devices, bool has_network, std::string tcp_ports,
                double keepalive_s, int spin_us, double close_patience_s, int cuda_device) {
                 nb::gil_scoped_release release;
                 new (engine)
                     Engine({tls, net_devices, has_network, tcp_ports, keepalive_s, spin_us, close_patience_s, cuda_device});
             },
             nb::arg("tls"), nb::arg("net_devices"), nb::arg("has_network"), nb::arg("tcp_ports"), nb::arg("keepalive_s"), nb::arg("spin_us"),
             nb::arg("close_patience_s"), nb::arg("cuda_device"))
        .def("allocate", &Engine::allocate, nb::arg("nbytes"), Unlocked())
        .def("enroll",
             [](Engine& engine, uint64_t address, uint64_t nbytes, const std::string& memory_type) {
                 const ucs_memory_type_t type = to_memory_type(memory_type);
                 nb::gil_scoped_release release;
                 return engine.enroll(address, nbytes, type);
             },
             nb::arg("address"), nb::arg("nbytes"), nb::arg("memory_type"))
        .def("region",
             [](const Engine& engine, size_t index) {
                 const auto memory = engine.region(index);
                 return nb::make_tuple(memory->address(), memory->nbytes(), to_bytes(memory->remote_key()));
             },
             nb::arg("index"))
        .def("is_shared", [](const Engine& engine, size_t index) { return engine.region(index)->is_shared(); },
             nb::arg("index"))
        .def("probe",
             [](const Engine& engine) {
                 const auto memory = engine.probe();
                 return nb::make_tuple(memory->address(), memory->nbytes(), to_bytes(memory->remote_key()));
             })
        .def("view", &view, nb::arg("index"))
        .def("open_target",
             [](Engine& engine, uint64_t id) {
                 std::string address;
                 {
                     nb::gil_scoped_release release;
                     address = engine.open_target(id);
                 }
                 return to_bytes(address);
             },
             nb::arg("id"))
        .def("close_target", &Engine::close_target, nb::arg("id"), Unlocked())
        .def("connect",
             [](Engine& engine, uint64_t id, const nb::bytes& worker_address,
                const std::vector<RegionTuple>& regions, const RegionTuple& probe) {
                 std::vector<RemoteRegionSpec> specs;
                 for (const RegionTuple& region : regions) {
                     specs.push_back(to_spec(region));
                 }
                 engine.connect(id, std::string(worker_address.c_str(), worker_address.size()),
                                std::move(specs), to_spec(probe));
             },
             nb::arg("id"), nb::arg("worker_address"), nb::arg("regions"), nb::arg("probe"))
        .def("try_connect",
             [](Engine& engine, uint64_t id, const nb::bytes& worker_address,
                const std::vector<RegionTuple>& regions, const RegionTuple& probe) {
                 std::vector<RemoteRegionSpec> specs;
                 for (const RegionTuple& region : regions) {
                     specs.push_back(to_spec(region));
                 }
                 std::string address(worker_address.c_str(), worker_address.size());
                 RemoteRegionSpec probe_spec = to_spec(probe);
                 nb::gil_scoped_release release;
                 return engine.try_connect(id, std::move(address), std::move(specs), std::move(probe_spec));
             },
             nb::arg("id"), nb::arg("worker_address"), nb::arg("regions"), nb::arg("probe"))
        .def("disconnect", &Engine::disconnect, nb::arg("id"))
        .def("submit",
             [](Engine& engine, uint64_t id, uint64_t tag, Int64Array source_region, Int64Array source_offset,
                Int64Array target_region, Int64Array target_offset, Int64Array nbytes) {
                 const PlanArrays plan =
                     to_plan(source_region, source_offset, target_region, target_offset, nbytes);
                 nb::gil_scoped_release release;
                 engine.submit(id, tag, plan);
             })
        .def("cancel", &Engine::cancel, nb::arg("tag"))
        .def("drain", [](Engine& engine) { return to_list(engine.drain()); })
        .def("wait", &Engine::wait, nb::arg("timeout_s"), Unlocked())
        .def("fileno", &Engine::fd)
        .def("close", &Engine::close, Unlocked());
}

}  // namespace

NB_MODULE(_ucx, module) {
    // `module` outlives both exceptions: a module is never unloaded.
    nb::exception<UcxError>(module, "UcxError", PyExc_RuntimeError);
    nb::exception<PlanOutOfBounds>(module, "PlanOutOfBoundsError", PyExc_ValueError);
    bind_engine(module);
    module.def("version", [] { return std::string(ucp_get_version_string()); });
}
