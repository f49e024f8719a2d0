#include "peer.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <set>
#include <sstream>
#include <utility>

#include "copy.hpp"

namespace baton {

namespace {

// Bytes issued per batch and turn of the loop: other endpoints, the commands and the acknowledgements
// get their turn every 0.6 ms even while memory is copied at 7 GB/s.
constexpr uint64_t SLICE_NBYTES = 4ull << 20;
constexpr uint64_t POPULATE_SLICE_NBYTES = 16ull << 20;
constexpr uint64_t PROBE_NBYTES[] = {64, Peer::PROBE_NBYTES_MAX};

double thread_cpu_seconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

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
           std::vector<RemoteRegionSpec> regions, RemoteRegionSpec probe)
    : id_(id), worker_(worker), events_(events), sources_(sources),
      specs_(std::move(regions)), probe_spec_(std::move(probe)) {}

Peer::~Peer() {
    for (const RemoteRegion& region : regions_) {
        ucp_rkey_destroy(region.key);
    }
    if (probe_.key != nullptr) {
        ucp_rkey_destroy(probe_.key);
    }
}

// Connecting -----------------------------------------------------------------------------------------

void Peer::connect(const std::string& worker_address) {
    worker_.touch();
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                        UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t*>(worker_address.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.cb = on_endpoint_error;
    params.err_handler.arg = this;
    try {
        check(ucp_ep_create(worker_.handle(), &params, &endpoint_), "ucp_ep_create");
        unpack_keys();
    } catch (const UcxError& error) {
        fail(error.what());
    }
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
    check(ucp_ep_rkey_unpack(endpoint_, region.spec.key.data(), &region.key), "ucp_ep_rkey_unpack");
    void* mapped = nullptr;
    if (ucp_rkey_ptr(region.key, region.spec.address, &mapped) == UCS_OK) {
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
        populate_mapping(region.mapped + populate_offset_, nbytes);
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

// What carries puts to this peer, for example "posix" or "posix,tcp". UCX tells the lanes of an endpoint
// with their uses only as text: `lane[1]:  1:tcp/lo.0 md[0] -> ... rma_bw#0`.
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
    settle_stopped();
    if (!batches_.empty() || own_outstanding_ > 0) {
        return false;
    }
    state_ = State::gone;
    push_last_event();
    return true;
}

// Batches --------------------------------------------------------------------------------------------

void Peer::submit(std::unique_ptr<Batch> batch) {
    if (!failure_.empty()) {
        batch->stop(failure_);
    }
    batches_.push_back(std::move(batch));
}

void Peer::cancel(uint64_t tag) {
    for (const auto& batch : batches_) {
        if (batch->tag == tag && !(batch->is_issued() && batch->is_flush_started)) {
            batch->stop("cancelled");
            has_news_ = true;
        }
    }
    // While connecting, a batch has put nothing and need not wait for a peer that may never answer.
    if (state_ != State::open) {
        settle_stopped();
    }
}

void Peer::settle_stopped() {
    std::erase_if(batches_, [this](const auto& batch) {
        const bool is_over = batch->is_stopped() && batch->outstanding == 0;
        if (is_over) {
            settle(*batch);
        }
        return is_over;
    });
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

bool Peer::pump() {
    bool moved = false;
    for (auto entry = batches_.begin(); entry != batches_.end() && failure_.empty();) {
        Batch& batch = **entry;
        moved |= advance(batch);
        const bool is_settled = batch.is_issued() && batch.outstanding == 0 &&
                                (!batch.has_remote_puts || batch.is_flush_started);
        if (is_settled && failure_.empty()) {
            settle(batch);
            entry = batches_.erase(entry);
            moved = true;
        } else {
            ++entry;
        }
    }
    return moved;
}

// Puts, then every callback, then a flush, then one settled event. A cancelled batch is flushed too:
// a put that called back may still be on its way to the target.
bool Peer::advance(Batch& batch) {
    if (!batch.is_issued()) {
        if (batch.outstanding >= batch.window) {
            return false;
        }
        const double before = thread_cpu_seconds();
        issue_slice(batch);
        batch.issue_seconds += thread_cpu_seconds() - before;
        return true;
    }
    if (batch.outstanding == 0 && batch.has_remote_puts && !batch.is_flush_started) {
        start_flush(batch);
        return true;
    }
    return false;
}

void Peer::issue_slice(Batch& batch) {
    worker_.touch();
    uint64_t budget = SLICE_NBYTES;
    while (!batch.is_issued() && budget > 0 && batch.outstanding < batch.window) {
        const Run& run = batch.runs[batch.next];
        const RemoteRegion& region = regions_[run.target_region];
        if (region.mapped != nullptr && sources_[run.source_region]->type() == UCS_MEMORY_TYPE_HOST) {
            if (!copy_slice(batch, run, region, budget)) {
                continue;
            }
        } else {
            put(batch, run, region);
            budget -= std::min(budget, run.nbytes);
        }
        ++batch.next;
    }
    if (!batch.has_remote_puts) {
        publish_copies();
    }
}

// Copies as much of the run as the budget allows. True when the run is finished.
bool Peer::copy_slice(Batch& batch, const Run& run, const RemoteRegion& region, uint64_t& budget) {
    const uint64_t nbytes = std::min(budget, run.nbytes - batch.next_offset);
    char* target = region.mapped + (run.target - region.spec.address) + batch.next_offset;
    if (batch.next + 1 < batch.runs.size()) {
        const Run& following = batch.runs[batch.next + 1];
        const RemoteRegion& its_region = regions_[following.target_region];
        if (its_region.mapped != nullptr) {
            prefetch_run(its_region.mapped + (following.target - its_region.spec.address),
                         reinterpret_cast<const void*>(following.source));
        }
    }
    copy_mapped(target, reinterpret_cast<const char*>(run.source) + batch.next_offset, nbytes);
    budget -= nbytes;
    batch.issued_nbytes += static_cast<int64_t>(nbytes);
    batch.next_offset += nbytes;
    if (batch.next_offset < run.nbytes) {
        return false;
    }
    batch.next_offset = 0;
    return true;
}

void Peer::put(Batch& batch, const Run& run, const RemoteRegion& region) {
    const Memory& source = *sources_[run.source_region];
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                          UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE |
                          UCP_OP_ATTR_FLAG_MULTI_SEND;
    params.cb.send = on_put;
    params.user_data = &batch;
    params.memh = source.handle();
    params.memory_type = source.type();
    batch.has_remote_puts = true;
    const ucs_status_ptr_t request = ucp_put_nbx(endpoint_, reinterpret_cast<const void*>(run.source),
                                                 run.nbytes, run.target, region.key, &params);
    if (UCS_PTR_IS_ERR(request)) {
        batch.stop(std::string("put: ") + ucs_status_string(UCS_PTR_STATUS(request)));
        return;
    }
    batch.issued_nbytes += static_cast<int64_t>(run.nbytes);
    if (request != nullptr) {
        ++batch.outstanding;
    }
}

void Peer::start_flush(Batch& batch) {
    worker_.touch();
    batch.is_flush_started = true;
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    params.cb.send = on_flush;
    params.user_data = &batch;
    const ucs_status_ptr_t request = ucp_ep_flush_nbx(endpoint_, &params);
    if (UCS_PTR_IS_ERR(request)) {
        batch.stop(std::string("flush: ") + ucs_status_string(UCS_PTR_STATUS(request)));
    } else if (request == nullptr) {
        batch.is_flushed = true;
    } else {
        ++batch.outstanding;
    }
}

void Peer::settle(const Batch& batch) {
    events_.push(batch.settle(!batch.has_remote_puts || batch.is_flushed));
}

// Callbacks, on the progress thread, from inside ucp_worker_progress ----------------------------------

void Peer::on_endpoint_error(void* peer, ucp_ep_h, ucs_status_t status) {
    static_cast<Peer*>(peer)->fail(std::string("endpoint: ") + ucs_status_string(status));
}

void Peer::on_put(void* request, ucs_status_t status, void* batch) {
    auto* owner = static_cast<Batch*>(batch);
    --owner->outstanding;
    if (status != UCS_OK) {
        owner->stop(std::string("put: ") + ucs_status_string(status));
    }
    ucp_request_free(request);
}

void Peer::on_flush(void* request, ucs_status_t status, void* batch) {
    auto* owner = static_cast<Batch*>(batch);
    --owner->outstanding;
    if (status == UCS_OK) {
        owner->is_flushed = true;
    } else {
        owner->stop(std::string("flush: ") + ucs_status_string(status));
    }
    ucp_request_free(request);
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
