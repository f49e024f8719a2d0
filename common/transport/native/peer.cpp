#include "peer.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>
#include <utility>

#include "copy.hpp"

namespace baton {

namespace {

constexpr uint64_t POPULATE_SLICE_NBYTES = 16ull << 20;
// The longest that a turn of the loop takes of a connection's patience, so that a process that was stopped
// finds some left.
constexpr double CLOSING_TURN_SECONDS_MAX = 1.0;
constexpr uint64_t PROBE_NBYTES[] = {64, Peer::PROBE_NBYTES_MAX};

std::string endpoint_text(ucp_ep_h endpoint) {
    char* text = nullptr;
    size_t nbytes = 0;
    std::FILE* stream = open_memstream(&text, &nbytes);
    if (stream == nullptr) {
        return "";
    }
    ucp_ep_print_info(endpoint, stream);
    std::fclose(stream);
    std::string copied(text, nbytes);
    std::free(text);
    return copied;
}

}  // namespace

Peer::Peer(uint64_t id, Worker& worker, EventQueue& events, const Sources& sources,
           std::vector<RemoteRegionSpec> regions, RemoteRegionSpec probe, bool owns_cuda_memory,
           double close_patience_s)
    : id_(id), worker_(worker), events_(events), sources_(sources), owns_cuda_memory_(owns_cuda_memory),
      close_patience_s_(close_patience_s), specs_(std::move(regions)), probe_spec_(std::move(probe)) {}

Peer::~Peer() {
    for (const RemoteRegion& region : regions_) {
        ucp_rkey_destroy(region.key);
    }
    if (probe_.key != nullptr) {
        ucp_rkey_destroy(probe_.key);
    }
}

// Connecting -----------------------------------------------------------------------------------------

bool Peer::reach(const std::string& worker_address) {
    worker_.touch();
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                        UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t*>(worker_address.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.cb = on_endpoint_error;
    params.err_handler.arg = this;
    if (ucp_ep_create(worker_.handle(), &params, &endpoint_) != UCS_OK) {
        endpoint_ = nullptr;
        return false;
    }
    try {
        unpack_keys();
    } catch (const UcxError& error) {
        fail(error.what());
    }
    return true;
}

void Peer::unpack_keys() {
    for (RemoteRegionSpec& spec : specs_) {
        regions_.push_back(unpack_key(std::move(spec)));
    }
    specs_.clear();
    probe_ = unpack_key(std::move(probe_spec_));
}

Peer::RemoteRegion Peer::unpack_key(RemoteRegionSpec spec) const {
    RemoteRegion region{std::move(spec), nullptr, nullptr};
    const RemoteKey key(region.spec.key);
    check(ucp_ep_rkey_unpack(endpoint_, key.of_ucx, &region.key), "ucp_ep_rkey_unpack");
    void* mapped = nullptr;
    // UCX also answers with an address for a region of a GPU, and it is the GPU's: nothing may be stored
    // there from here. Memory of a GPU is never a source of such copies anyway. UCX's key
    // names a process and a file of it by numbers that are reused, so the memory found must be checked.
    const bool may_map = !owns_cuda_memory_ && key.extent.is_shared();
    if (may_map && ucp_rkey_ptr(region.key, region.spec.address, &mapped) == UCS_OK) {
        const SharedExtent found = shared_extent(mapped, region.spec.nbytes);
        if (found != key.extent) {
            ucp_rkey_destroy(region.key);
            throw UcxError("the peer announced a region of " + std::to_string(region.spec.nbytes) +
                           " bytes and shares " + (found.is_shared() ? "other memory" : "less"));
        }
        region.mapped = static_cast<char*>(mapped);
    }
    return region;
}

bool Peer::populate_slice() {
    if (populate_region_ == regions_.size()) {
        probe();
        return true;
    }
    const RemoteRegion& region = regions_[populate_region_];
    const uint64_t left = region.mapped == nullptr ? 0 : region.spec.nbytes - populate_offset_;
    const uint64_t nbytes = std::min(left, POPULATE_SLICE_NBYTES);
    if (nbytes == 0) {
        ++populate_region_;
        populate_offset_ = 0;
    } else {
        const int error = populate_mapping(region.mapped + populate_offset_, nbytes);
        if (error != 0) {
            fail("target region " + std::to_string(populate_region_) + ": " + std::strerror(error));
        }
        populate_offset_ += nbytes;
    }
    return true;
}

// Writes into the peer's scratch memory and flushes: when that is back, the lanes are up, the first
// real put is not slow, and a peer that can't be written to is known now.
void Peer::probe() {
    static const char zeros[PROBE_NBYTES_MAX] = {};
    state_ = State::probing;
    worker_.touch();
    ucp_request_param_t params{};
    params.op_attr_mask =
        UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    params.cb.send = on_own_request;
    params.user_data = this;
    params.memory_type = UCS_MEMORY_TYPE_HOST;
    for (const uint64_t nbytes : PROBE_NBYTES) {
        track(ucp_put_nbx(endpoint_, zeros, std::min(nbytes, probe_.spec.nbytes), probe_.spec.address,
                          probe_.key, &params),
              "probe put");
    }
    params.op_attr_mask &= ~static_cast<uint32_t>(UCP_OP_ATTR_FIELD_MEMORY_TYPE);
    track(ucp_ep_flush_nbx(endpoint_, &params), "probe flush");
}

void Peer::track(ucs_status_ptr_t request, const char* what) {
    if (UCS_PTR_IS_ERR(request)) {
        fail(std::string(what) + ": " + ucs_status_string(UCS_PTR_STATUS(request)));
    } else if (request != nullptr) {
        ++own_outstanding_;
    }
}

bool Peer::finish_connecting() {
    if (own_outstanding_ > 0) {
        return false;
    }
    state_ = State::open;
    events_.push(Event{EventKind::peer_connected, id_, transports()});
    return true;
}

// The carriers of puts to this peer, for example "posix" or "posix,tcp". UCX gives the lanes of an endpoint
// and their uses only as text: `lane[1]:  1:tcp/lo.0 md[0] -> ... rma_bw#0`.
std::string Peer::transports() const {
    std::set<std::string> names;
    bool is_all_mapped = !regions_.empty();
    for (const RemoteRegion& region : regions_) {
        is_all_mapped &= region.mapped != nullptr;
        if (region.mapped != nullptr) {
            names.insert("posix");
        }
    }
    if (!is_all_mapped) {
        std::istringstream lines(endpoint_text(endpoint_));
        for (std::string line; std::getline(lines, line);) {
            const size_t lane = line.find("]:");
            const size_t begin = line.find(':', lane + 2);
            const size_t end = line.find('/', begin);
            const bool is_put_lane = line.find(" rma", end) != std::string::npos;
            if (lane != std::string::npos && end != std::string::npos && is_put_lane) {
                names.insert(line.substr(begin + 1, end - begin - 1));
            }
        }
    }
    std::string joined;
    for (const std::string& name : names) {
        joined += (joined.empty() ? "" : ",") + name;
    }
    return joined;
}

// Closing --------------------------------------------------------------------------------------------

void Peer::fail(const std::string& reason) {
    if (failure_.empty()) {
        failure_ = reason;
        has_news_ = true;
    }
}

void Peer::disconnect() {
    is_disconnect_ = true;
    fail("the connection was closed here");
}

void Peer::abandon() {
    fail("the transport was closed");
    for (const auto& batch : batches_) {
        batch->stop(failure_);
        settle(*batch);
    }
    batches_.clear();
    regions_.clear();
    probe_.key = nullptr;
    push_last_event();
}

void Peer::push_last_event() {
    events_.push(is_disconnect_ ? Event{EventKind::peer_closed, id_}
                                : Event{EventKind::peer_failed, id_, failure_});
}

// Closing by force completes every operation with an error, but its return is not the end of them:
// `finish_close` waits for each callback.
bool Peer::begin_close() {
    state_ = State::closing;
    closing_turn_ = std::chrono::steady_clock::now();
    for (const auto& batch : batches_) {
        batch->stop(failure_);
    }
    if (endpoint_ != nullptr) {
        worker_.touch();
        ucp_request_param_t params{};
        params.op_attr_mask =
            UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
        params.flags = UCP_EP_CLOSE_FLAG_FORCE;
        params.cb.send = on_close;
        params.user_data = this;
        track(ucp_ep_close_nbx(std::exchange(endpoint_, nullptr), &params), "ucp_ep_close_nbx");
    }
    return true;
}

bool Peer::finish_close() {
    if (must_ask_device_ && has_device_answered()) {
        must_ask_device_ = false;
    }
    settle_stopped();
    if (!batches_.empty() || own_outstanding_ > 0) {
        spend_patience();
        return false;
    }
    state_ = State::gone;
    push_last_event();
    return true;
}

// Asked once UCX follows no operation of this connection any more.
bool Peer::has_device_answered() {
    const auto is_outstanding = [](const auto& batch) { return batch->outstanding > 0; };
    if (device_wait_ == nullptr) {
        if (own_outstanding_ > 0 || std::any_of(batches_.begin(), batches_.end(), is_outstanding)) {
            return false;
        }
        device_wait_ = std::make_unique<DeviceWait>();
    }
    if (!device_wait_->is_over()) {
        return false;
    }
    if (device_wait_->error() != 0) {
        throw UcxError("cuCtxSynchronize failed with CUDA driver error " +
                       std::to_string(device_wait_->error()));
    }
    return true;
}

// UCX cancels operations within milliseconds, but waits for copies that a device has begun. A copy that
// never ends, on a device that hangs, can't be taken back: only the end of this process proves it over.
// Time in which this thread did not run, in a process that was stopped, does not count.
void Peer::spend_patience() {
    const auto now = std::chrono::steady_clock::now();
    const double since_turn = std::chrono::duration<double>(now - closing_turn_).count();
    closing_turn_ = now;
    closing_seconds_ += std::min(since_turn, CLOSING_TURN_SECONDS_MAX);
    if (closing_seconds_ > close_patience_s_) {
        std::ostringstream text;
        text << batches_.size() << (batches_.size() == 1 ? " transfer" : " transfers")
             << " of a closed connection did not end within " << close_patience_s_ << " s";
        throw UcxError(text.str());
    }
}

bool Peer::turn() {
    has_news_ = false;
    if (!failure_.empty() && state_ != State::closing) {
        return begin_close();
    }
    switch (state_) {
        case State::populating: return populate_slice();
        case State::probing: return finish_connecting();
        case State::open: return pump();
        case State::closing: return finish_close();
        case State::gone: return false;
    }
    return false;
}

// Callbacks, on the progress thread, from inside ucp_worker_progress ----------------------------------

void Peer::on_endpoint_error(void* peer, ucp_ep_h, ucs_status_t status) {
    static_cast<Peer*>(peer)->fail(std::string("endpoint: ") + ucs_status_string(status));
}

void Peer::on_own_request(void* request, ucs_status_t status, void* peer) {
    auto* owner = static_cast<Peer*>(peer);
    --owner->own_outstanding_;
    if (status != UCS_OK) {
        owner->fail(std::string("probe: ") + ucs_status_string(status));
    }
    ucp_request_free(request);
}

void Peer::on_close(void* request, ucs_status_t, void* peer) {
    --static_cast<Peer*>(peer)->own_outstanding_;
    ucp_request_free(request);
}

}  // namespace baton
