// How a peer's batches advance: puts, then every callback, then a flush, then one settled event.
#include <algorithm>
#include <ctime>
#include <vector>

#include "copy.hpp"
#include "peer.hpp"

namespace baton {

namespace {

// Bytes issued per batch and turn of the loop: other endpoints, the commands and the acknowledgements
// get their turn every 0.6 ms even while memory is copied at 7 GB/s.
constexpr uint64_t SLICE_NBYTES = 4ull << 20;
// Longer runs of host memory go in parts: over tcp puts of 1 to 4 MiB reached 6.4 to 6.7 GB/s, one of
// 64 MiB 4.3. A put of GPU memory costs the same whatever its size.
constexpr uint64_t HOST_PUT_NBYTES_MAX = 1ull << 20;

double thread_cpu_seconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace

void Peer::submit(std::unique_ptr<Batch> batch) {
    if (!failure_.empty()) {
        batch->stop(failure_);
    }
    batch->owner = this;
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
    if (must_ask_device_) {
        return;
    }
    std::erase_if(batches_, [this](const auto& batch) {
        const bool is_over = batch->is_stopped() && batch->outstanding == 0;
        if (is_over) {
            settle(*batch);
        }
        return is_over;
    });
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
        const bool is_mapped =
            region.mapped != nullptr && sources_[run.source_region]->type() == UCS_MEMORY_TYPE_HOST;
        const uint64_t nbytes = is_mapped ? copy_slice(batch, run, region, budget) : put(batch, run, region);
        budget -= std::min(budget, nbytes);
        batch.next_offset += nbytes;
        if (batch.next_offset == run.nbytes) {
            batch.next_offset = 0;
            ++batch.next;
        }
    }
}

// Copies as much of the run as the budget allows, and says how many bytes that was.
uint64_t Peer::copy_slice(Batch& batch, const Run& run, const RemoteRegion& region, uint64_t budget) {
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
    batch.issued_nbytes += static_cast<int64_t>(nbytes);
    return nbytes;
}

// Puts the rest of the run, or a part of it, and says how many bytes that is.
uint64_t Peer::put(Batch& batch, const Run& run, const RemoteRegion& region) {
    const Memory& source = *sources_[run.source_region];
    const uint64_t rest = run.nbytes - batch.next_offset;
    const uint64_t nbytes =
        source.type() == UCS_MEMORY_TYPE_HOST ? std::min(rest, HOST_PUT_NBYTES_MAX) : rest;
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                          UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE |
                          UCP_OP_ATTR_FLAG_MULTI_SEND;
    params.cb.send = on_put;
    params.user_data = &batch;
    params.memh = source.handle();
    params.memory_type = source.type();
    batch.has_remote_puts = true;
    const ucs_status_ptr_t request =
        ucp_put_nbx(endpoint_, reinterpret_cast<const void*>(run.source + batch.next_offset), nbytes,
                    run.target + batch.next_offset, region.key, &params);
    if (UCS_PTR_IS_ERR(request)) {
        fail_put(batch, UCS_PTR_STATUS(request));
        return nbytes;
    }
    batch.issued_nbytes += static_cast<int64_t>(nbytes);
    if (request != nullptr) {
        ++batch.outstanding;
    }
    return nbytes;
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
        fail_flush(batch, UCS_PTR_STATUS(request));
    } else if (request == nullptr) {
        batch.is_flushed = true;
    } else {
        ++batch.outstanding;
    }
}

// A device may copy all the same: UCX follows a copy by an event, and does not know of one whose event
// could not be recorded. So the connection is closed, and settles nothing before the device is asked.
void Peer::fail_put(Batch& batch, ucs_status_t status) {
    const std::string reason = std::string("put: ") + ucs_status_string(status);
    batch.stop(reason);
    if (owns_cuda_memory_ && status != UCS_ERR_CANCELED) {
        must_ask_device_ = true;
        fail(reason);
    }
}

// Without a flush it is unknown whether the puts have arrived. So the connection is given up: the target
// closes its end as well, which ends what the network still carries.
void Peer::fail_flush(Batch& batch, ucs_status_t status) {
    const std::string reason = std::string("flush: ") + ucs_status_string(status);
    batch.stop(reason);
    fail(reason);
}

// The receiver of the event must see the bytes that were copied here, beside those that UCX put.
void Peer::settle(const Batch& batch) {
    publish_copies();
    events_.push(batch.settle(!batch.has_remote_puts || batch.is_flushed));
}

void Peer::on_put(void* request, ucs_status_t status, void* batch) {
    auto* owner = static_cast<Batch*>(batch);
    --owner->outstanding;
    if (status != UCS_OK) {
        owner->owner->fail_put(*owner, status);
    }
    ucp_request_free(request);
}

void Peer::on_flush(void* request, ucs_status_t status, void* batch) {
    auto* owner = static_cast<Batch*>(batch);
    --owner->outstanding;
    if (status == UCS_OK) {
        owner->is_flushed = true;
    } else {
        owner->owner->fail_flush(*owner, status);
    }
    ucp_request_free(request);
}

}  // namespace baton
