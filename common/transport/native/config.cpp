#include "config.hpp"

#include <ucs/config/global_opts.h>
#include <ucs/debug/log_def.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>

namespace baton {

void check(ucs_status_t status, const std::string& what) {
    if (status != UCS_OK) {
        throw UcxError(what + ": " + ucs_status_string(status));
    }
}

namespace {

// The oldest UCX that serves. 1.21 keeps a peer's GPU memory open until this process ends, so the memory
// of a dead peer is never free again.
constexpr unsigned UCX_API_MAJOR = 1;
constexpr unsigned UCX_API_MINOR = 22;

void check_version() {
    unsigned major = 0;
    unsigned minor = 0;
    unsigned release = 0;
    ucp_get_version(&major, &minor, &release);
    if (std::pair(major, minor) < std::pair(UCX_API_MAJOR, UCX_API_MINOR)) {
        throw UcxError(std::string("UCX ") + ucp_get_version_string() + ": must be " +
                       std::to_string(UCX_API_MAJOR) + "." + std::to_string(UCX_API_MINOR) + " or newer");
    }
}

thread_local bool is_quiet = false;

// UCX logs to stdout by default, which would corrupt any protocol spoken there.
ucs_log_func_rc_t log_to_stderr(const char* file, unsigned line, const char*, ucs_log_level_t level,
                                const ucs_log_component_config_t*, const char* message, va_list ap) {
    if (is_quiet) {
        return UCS_LOG_FUNC_RC_STOP;
    }
    char text[1024];
    std::vsnprintf(text, sizeof(text), message, ap);
    const char* base = std::strrchr(file, '/');
    std::fprintf(stderr, "UCX %s %s:%u %s\n", ucs_log_level_names[level], base ? base + 1 : file, line,
                 text);
    return UCS_LOG_FUNC_RC_STOP;
}

struct ConfigOwner {
    ucp_config_t* config = nullptr;
    ~ConfigOwner() { ucp_config_release(config); }
};

void set(ucp_config_t* config, const char* name, const std::string& value) {
    check(ucp_config_modify(config, name, value.c_str()), std::string("UCX setting ") + name + "=" + value);
}

}  // namespace

QuietLog::QuietLog() { is_quiet = true; }

QuietLog::~QuietLog() { is_quiet = false; }

Context::Context(const EngineSettings& settings) {
    check_version();
    static std::once_flag log_handler_installed;
    std::call_once(log_handler_installed, [] { ucs_log_push_handler(log_to_stderr); });

    // UCX learns of device memory through hooks in the allocator, which may bypass them. Every operation
    // of ours names its memory's type.
    check(ucs_global_opts_set_value("MEMTYPE_CACHE", "n"), "UCX setting MEMTYPE_CACHE=n");
    // The user's UCX_* variables are read here; the settings below win over them.
    ConfigOwner owner;
    check(ucp_config_read(nullptr, nullptr, &owner.config), "ucp_config_read");
    set(owner.config, "TLS", settings.tls);
    set(owner.config, "NET_DEVICES", settings.net_devices);
    set(owner.config, "TCP_PORT_RANGE", settings.tcp_ports);
    // Peer error handling demands lanes that can invalidate remote keys as long as rendezvous is
    // possible; tcp and cma have none, and UCX would emulate puts in software instead.
    set(owner.config, "RNDV_THRESH", "inf");
    // Shared memory is refused under peer error handling unless this is set.
    set(owner.config, "MM_ERROR_HANDLING", "y");
    // An emulated put may abort() this process when its peer dies. Fail the put instead.
    set(owner.config, "PROTO_EMULATION_ENABLE", "n");
    // Traffic over an interface without an endpoint of ours, as at every target of puts, would first
    // wake a thread of UCX, which wakes ours. Over tcp that halved the bandwidth of long runs.
    set(owner.config, "ADAPTIVE_PROGRESS", "n");
    set(owner.config, "KEEPALIVE_INTERVAL", std::to_string(settings.keepalive_s) + "s");

    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
    params.features = UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
    params.name = "baton";
    params.mt_workers_shared = 0;
    check(ucp_init_version(UCX_API_MAJOR, UCX_API_MINOR, &params, owner.config, &handle_),
          "ucp_init with TLS=" + settings.tls);
}

Context::~Context() { ucp_cleanup(handle_); }

}  // namespace baton
