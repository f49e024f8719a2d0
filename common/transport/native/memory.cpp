#include "memory.hpp"

#include <sys/mman.h>

#include <cstring>

namespace baton {

namespace {

// A CUDA IPC handle, which the key of memory that another process can open must hold.
constexpr size_t CUDA_IPC_HANDLE_NBYTES = 64;

// Copies at random places of a pool (by the kernel for tcp, by us for shared memory) then look up an
// address in fewer steps. Advice only: a kernel may have none to give, for shared memory mostly.
void ask_for_large_pages(uint64_t address, uint64_t nbytes) {
    constexpr uint64_t page_nbytes = 4096;
    // Whole pages, so that the mapping is not split.
    const uint64_t begin = address & ~(page_nbytes - 1);
    const uint64_t end = (address + nbytes + page_nbytes - 1) & ~(page_nbytes - 1);
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace

std::shared_ptr<Memory> Memory::allocate(std::shared_ptr<Context> context, uint64_t nbytes) {
    ucp_mem_map_params_t params{};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_FLAGS;
    params.flags = UCP_MEM_MAP_ALLOCATE;
    std::shared_ptr<Memory> memory(new Memory(std::move(context), params, nbytes, UCS_MEMORY_TYPE_HOST));
    ask_for_large_pages(memory->address(), nbytes);
    return memory;
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
    if (type == UCS_MEMORY_TYPE_HOST) {
        extent_ = shared_extent(attributes.address, nbytes);
    }
    remote_key_.assign(reinterpret_cast<const char*>(&extent_), sizeof(extent_));
    remote_key_.append(static_cast<const char*>(key), key_nbytes);
    ucp_rkey_buffer_release(key);
    // UCX only warns when its CUDA modules can't be loaded, and registers the memory for no transport:
    // every transfer would fail much later.
    if (type == UCS_MEMORY_TYPE_CUDA && key_nbytes < CUDA_IPC_HANDLE_NBYTES) {
        ucp_mem_unmap(context_->handle(), handle_);
        throw UcxError(what + " of CUDA memory: no UCX transport can share it; its CUDA modules need "
                              "libcuda.so.1 and libnvidia-ml.so.1");
    }
}

RemoteKey::RemoteKey(const std::string& packed) {
    if (packed.size() <= sizeof(extent)) {
        throw UcxError("a memory key of " + std::to_string(packed.size()) + " bytes is too short");
    }
    std::memcpy(&extent, packed.data(), sizeof(extent));
    of_ucx = packed.data() + sizeof(extent);
}

Memory::~Memory() { ucp_mem_unmap(context_->handle(), handle_); }

}  // namespace baton
