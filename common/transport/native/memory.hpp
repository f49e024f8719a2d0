// Registered memory of this process: source of puts, and target of the peers' puts.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "config.hpp"
#include "copy.hpp"

namespace baton {

class Memory {
public:
    // Memory that UCX allocates, so that other processes of this host can map it if TLS has posix.
    static std::shared_ptr<Memory> allocate(std::shared_ptr<Context> context, uint64_t nbytes);
    // Memory of the caller, who keeps it alive until the engine is closed.
    static std::shared_ptr<Memory> enroll(std::shared_ptr<Context> context, uint64_t address,
                                          uint64_t nbytes, ucs_memory_type_t type);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    uint64_t address() const { return address_; }
    uint64_t nbytes() const { return nbytes_; }
    ucs_memory_type_t type() const { return type_; }
    ucp_mem_h handle() const { return handle_; }
    // For a peer: the identity of the memory if it is shared, and UCX's key.
    const std::string& remote_key() const { return remote_key_; }
    bool is_shared() const { return extent_.is_shared(); }

private:
    Memory(std::shared_ptr<Context> context, ucp_mem_map_params_t& params, uint64_t nbytes,
           ucs_memory_type_t type);

    std::shared_ptr<Context> context_;
    ucp_mem_h handle_ = nullptr;
    uint64_t address_ = 0;
    uint64_t nbytes_;
    ucs_memory_type_t type_;
    SharedExtent extent_;
    std::string remote_key_;
};

// The two parts of a remote key. Throws UcxError if there is not even room for the first.
struct RemoteKey {
    explicit RemoteKey(const std::string& packed);
    SharedExtent extent;
    const void* of_ucx;
};

}  // namespace baton
