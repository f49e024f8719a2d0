// UCX configuration of this process: the settings made in code, and why. Knows nothing of peers.
#pragma once

#include <ucp/api/ucp.h>

#include <memory>
#include <stdexcept>
#include <string>

namespace baton {

// A refused call of UCX. The text names the call and has UCX's own words.
struct UcxError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// While it lives, UCX logs nothing on this thread: for calls that may fail.
struct QuietLog {
    QuietLog();
    ~QuietLog();
    QuietLog(const QuietLog&) = delete;
    QuietLog& operator=(const QuietLog&) = delete;
};

void check(ucs_status_t status, const std::string& what);

struct EngineSettings {
    std::string tls;          // explicit list, for example "posix,tcp"
    std::string net_devices;  // "all" or a list of UCX device names
    bool has_network = true;  // whether `tls` has a transport that other hosts are reached by
    std::string tcp_ports = "0";  // "40000-40100"; 0: any
    double keepalive_s = 2.0;
    int spin_us = 0;
    double close_patience_s = 30.0;
    int cuda_device = -1;     // -1: this process owns no CUDA memory
};

// Owns the ucp_context_h. Shared by the engine and by every region, because memory that Python still
// looks at may outlive the engine and must be unmapped before the context goes.
class Context {
public:
    explicit Context(const EngineSettings& settings);
    ~Context();
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;
    ucp_context_h handle() const { return handle_; }

private:
    ucp_context_h handle_ = nullptr;
};

}  // namespace baton
