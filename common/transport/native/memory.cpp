#include "memory.hpp"

namespace baton {

std::shared_ptr<Memory> Memory::allocate(std::shared_ptr<Context> context, uint64_t nbytes) {
    ucp_mem_map_params_t params{};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_FLAGS;
    params.flags = UCP_MEM_MAP_ALLOCATE;
    return std::shared_ptr<Memory>(new Memory(std::move(context), params, nbytes, UCS_MEMORY_TYPE_HOST));
}

std::shared_ptr<Memory> Memory::enroll(std::shared_ptr<Context> context, uint64_t address,
                                       uint64_t nbytes, ucs_memory_type_t type) {
    ucp_mem_map_params_t params{};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS;
    params.address = reinterpret_cast<void*>(address);
    return std::shared_ptr<Memory>(new Memory(std::move(context), params, nbytes, type));
}

Memory::Memory(std::shared_ptr<Context> context, ucp_mem_map_params_t& params, uint64_t nbytes,
               ucs_memory_type_t type)
    : context_(std::move(context)), nbytes_(nbytes), type_(type) {
    params.field_mask |= UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
    params.length = nbytes;
    params.memory_type = type;
    const std::string what = "ucp_mem_map of " + std::to_string(nbytes) + " bytes";
    check(ucp_mem_map(context_->handle(), &params, &handle_), what);

    ucp_mem_attr_t attributes{};
    attributes.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS;
    void* key = nullptr;
    size_t key_nbytes = 0;
    ucs_status_t status = ucp_mem_query(handle_, &attributes);
    if (status == UCS_OK) {
        status = ucp_rkey_pack(context_->handle(), handle_, &key, &key_nbytes);
    }
    if (status != UCS_OK) {
        ucp_mem_unmap(context_->handle(), handle_);
        check(status, what);
    }
    address_ = reinterpret_cast<uint64_t>(attributes.address);
    remote_key_.assign(static_cast<const char*>(key), key_nbytes);
    ucp_rkey_buffer_release(key);
}

Memory::~Memory() { ucp_mem_unmap(context_->handle(), handle_); }

}  // namespace baton
