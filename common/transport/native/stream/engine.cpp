#include "engine.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

namespace baton {

StreamEngine::StreamEngine(const StreamSettings& settings)
    : settings_(settings), tls_(settings.is_encrypted ? std::make_unique<TlsClient>() : nullptr),
      targets_(settings.bounds, settings.is_encrypted) {}

StreamEngine::~StreamEngine() { close(); }

void StreamEngine::close() {
    std::map<uint64_t, std::unique_ptr<StreamPeer>> peers;
    {
        const std::lock_guard lock(mutex_);
        is_closed_ = true;
        peers.swap(peers_);
    }
    for (const auto& [id, peer] : peers) {
        peer->disconnect();
    }
    peers.clear();
    targets_.end();
    const std::lock_guard lock(mutex_);
    regions_.clear();
}

size_t StreamEngine::allocate(uint64_t nbytes) {
    void* start = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) {
        throw StreamError(system_error("mmap of " + std::to_string(nbytes) + " bytes", errno));
    }
    // The kernel's copies at random places of a pool then look up an address in fewer steps.
    madvise(start, nbytes, MADV_HUGEPAGE);
    std::shared_ptr<void> owner(start, [nbytes](void* mapped) { munmap(mapped, nbytes); });
    const std::lock_guard lock(mutex_);
    regions_.push_back({static_cast<char*>(start), nbytes, std::move(owner)});
    return regions_.size() - 1;
}

size_t StreamEngine::enroll(uint64_t address, uint64_t nbytes) {
    const std::lock_guard lock(mutex_);
    regions_.push_back({reinterpret_cast<char*>(address), nbytes, nullptr});
    return regions_.size() - 1;
}

StreamRegion StreamEngine::region(size_t index) const {
    const std::lock_guard lock(mutex_);
    return regions_.at(index);
}

uint16_t StreamEngine::listen(const std::string& host, uint16_t low, uint16_t high) {
    return targets_.listen(host, low, high);
}

void StreamEngine::open_target(const TargetId& id, const Secret& secret, const std::vector<size_t>& regions) {
    std::vector<StreamRegion> opened;
    {
        const std::lock_guard lock(mutex_);
        for (const size_t index : regions) {
            opened.push_back(regions_.at(index));
        }
    }
    targets_.open(id, secret, std::move(opened));
}

void StreamEngine::connect(uint64_t id, StreamAddress address, const std::vector<uint64_t>& regions) {
    forget_gone();
    std::vector<Extent> extents;
    for (const uint64_t nbytes : regions) {
        extents.push_back({0, nbytes});
    }
    const std::lock_guard lock(mutex_);
    if (is_closed_) {
        throw StreamError("the transport is closed");
    }
    auto peer = std::make_unique<StreamPeer>(id, std::move(address), std::move(extents),
                                             settings_.connection_count, settings_.bounds, tls_.get(), events_);
    peer->start();
    peers_[id] = std::move(peer);
}

// Peers whose last event was pushed; their threads are at their end.
void StreamEngine::forget_gone() {
    std::vector<std::unique_ptr<StreamPeer>> gone;
    const std::lock_guard lock(mutex_);
    for (auto entry = peers_.begin(); entry != peers_.end();) {
        const auto here = entry++;
        if (here->second->is_gone()) {
            gone.push_back(std::move(here->second));
            peers_.erase(here);
        }
    }
}

void StreamEngine::disconnect(uint64_t id) {
    const std::lock_guard lock(mutex_);
    if (const auto found = peers_.find(id); found != peers_.end()) {
        found->second->disconnect();
    }
}

void StreamEngine::submit(uint64_t id, uint64_t tag, const PlanArrays& plan) {
    const std::lock_guard lock(mutex_);
    std::vector<Extent> sources;
    for (const StreamRegion& region : regions_) {
        sources.push_back({reinterpret_cast<uint64_t>(region.start), region.nbytes});
    }
    const auto found = peers_.find(id);
    if (found == peers_.end()) {
        events_.push(Event{EventKind::transfer_settled, tag, "the connection is gone"});
        return;
    }
    found->second->submit(std::make_unique<Batch>(tag, plan, sources, found->second->regions()));
}

void StreamEngine::cancel(uint64_t tag) {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, peer] : peers_) {
        peer->cancel(tag);
    }
}

}  // namespace baton
