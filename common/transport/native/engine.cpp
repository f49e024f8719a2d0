#include "engine.hpp"

#include <pthread.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

#include "cuda.hpp"

namespace baton {

namespace {

using Clock = std::chrono::steady_clock;

// Force-closing an endpoint takes milliseconds; a close that takes longer than this is given up, and
// destroying the worker ends it.
constexpr auto CLOSE_PATIENCE = std::chrono::seconds(5);
// How often a closing connection is checked while UCX reports nothing of it.
constexpr int CLOSING_LOOK_MS = 100;
constexpr int EPOLL_EVENTS_MAX = 64;
const char* const ENGINE_CLOSED = "the transport is closed";

}  // namespace

Engine::Engine(const EngineSettings& settings)
    : spin_us_(settings.spin_us), close_patience_s_(settings.close_patience_s),
      owns_cuda_memory_(settings.cuda_device >= 0) {
    std::promise<void> started;
    std::future<void> outcome = started.get_future();
    thread_ = std::thread([this, settings, promise = std::move(started)]() mutable {
        run(settings, std::move(promise));
    });
    try {
        outcome.get();
    } catch (...) {
        thread_.join();
        throw;
    }
}

Engine::~Engine() { close(); }

void Engine::close() {
    {
        const std::lock_guard lock(mutex_);
        is_closed_ = true;
    }
    commands_.post([this] { is_stopping_ = true; });
    if (thread_.joinable()) {
        thread_.join();
    }
}

// Commands, called on Python's threads ---------------------------------------------------------------

void Engine::post(CommandQueue::Command command) {
    const std::lock_guard lock(mutex_);
    if (is_closed_) {
        throw UcxError(failure_.empty() ? ENGINE_CLOSED : failure_);
    }
    commands_.post(std::move(command));
}

std::string Engine::why_closed() const {
    const std::lock_guard lock(mutex_);
    return failure_.empty() ? ENGINE_CLOSED : failure_;
}

template <typename Result>
Result Engine::call(std::function<Result()> work) {
    auto task = std::make_shared<std::packaged_task<Result()>>(std::move(work));
    std::future<Result> result = task->get_future();
    post([task = std::move(task)] { (*task)(); });
    try {
        return result.get();
    } catch (const std::future_error&) {
        throw UcxError(why_closed());
    }
}

size_t Engine::allocate(uint64_t nbytes) {
    return call<size_t>([this, nbytes] { return add_region(Memory::allocate(context_, nbytes)); });
}

size_t Engine::enroll(uint64_t address, uint64_t nbytes, ucs_memory_type_t type) {
    return call<size_t>([this, address, nbytes, type] {
        return add_region(Memory::enroll(context_, address, nbytes, type));
    });
}

size_t Engine::add_region(std::shared_ptr<Memory> memory) {
    const std::lock_guard lock(mutex_);
    regions_.push_back(std::move(memory));
    return regions_.size() - 1;
}

std::shared_ptr<Memory> Engine::region(size_t index) const {
    const std::lock_guard lock(mutex_);
    return regions_.at(index);
}

std::string Engine::open_target(uint64_t id) {
    return call<std::string>([this, id] {
        auto worker = std::make_unique<Worker>(context_);
        std::string address = worker->address();
        watch(worker->event_fd(), worker.get());
        target_workers_[id] = std::move(worker);
        return address;
    });
}

void Engine::close_target(uint64_t id) {
    call<bool>([this, id] {
        spare_files_.lend();
        return target_workers_.erase(id) == 1;
    });
}

void Engine::connect(uint64_t id, std::string worker_address, std::vector<RemoteRegionSpec> regions,
                     RemoteRegionSpec probe) {
    remember_extents(id, regions);
    post([this, id, address = std::move(worker_address), regions = std::move(regions),
          probe = std::move(probe)]() mutable {
        Peer& peer = add_peer(id, std::move(regions), std::move(probe));
        if (!peer.reach(address)) {
            peer.fail("no transport reaches it");
        }
    });
}

bool Engine::try_connect(uint64_t id, std::string worker_address, std::vector<RemoteRegionSpec> regions,
                         RemoteRegionSpec probe) {
    remember_extents(id, regions);
    return call<bool>([this, id, address = std::move(worker_address), regions = std::move(regions),
                       probe = std::move(probe)] {
        const QuietLog quiet;
        if (add_peer(id, regions, probe).reach(address)) {
            return true;
        }
        peers_.pop_back();
        const std::lock_guard lock(mutex_);
        open_targets_.erase(id);
        return false;
    });
}

Peer& Engine::add_peer(uint64_t id, std::vector<RemoteRegionSpec> regions, RemoteRegionSpec probe) {
    peers_.push_back(std::make_unique<Peer>(id, *initiator_, events_, regions_, std::move(regions),
                                            std::move(probe), owns_cuda_memory_, close_patience_s_));
    return *peers_.back();
}

void Engine::remember_extents(uint64_t id, const std::vector<RemoteRegionSpec>& regions) {
    std::vector<Extent> extents;
    for (const RemoteRegionSpec& region : regions) {
        extents.push_back({region.address, region.nbytes});
    }
    const std::lock_guard lock(mutex_);
    open_targets_[id] = std::move(extents);
}

void Engine::disconnect(uint64_t id) {
    post([this, id] {
        if (Peer* peer = find_peer(id)) {
            peer->disconnect();
        }  // else it has failed meanwhile, and that event is its last
    });
}

void Engine::submit(uint64_t id, uint64_t tag, const PlanArrays& plan) {
    std::vector<Extent> sources;
    std::vector<Extent> targets;
    {
        const std::lock_guard lock(mutex_);
        const auto entry = open_targets_.find(id);
        if (entry == open_targets_.end()) {
            settle_gone(tag);
            return;
        }
        for (const auto& memory : regions_) {
            sources.push_back({memory->address(), memory->nbytes()});
        }
        targets = entry->second;
    }
    auto batch = std::make_shared<std::unique_ptr<Batch>>(
        std::make_unique<Batch>(tag, plan, sources, targets));
    post([this, id, tag, batch] {
        if (Peer* peer = find_peer(id)) {
            peer->submit(std::move(*batch));
        } else {
            settle_gone(tag);
        }
    });
}

// The peer was lost after the caller had submitted, or before it could know.
void Engine::settle_gone(uint64_t tag) {
    events_.push(Event{EventKind::transfer_settled, tag, "the connection is gone"});
}

void Engine::cancel(uint64_t tag) {
    post([this, tag] {
        for (const auto& peer : peers_) {
            peer->cancel(tag);
        }
    });
}

// The progress thread --------------------------------------------------------------------------------

void Engine::run(const EngineSettings& settings, std::promise<void> started) {
    pthread_setname_np(pthread_self(), "baton-ucx");
    try {
        start(settings);
    } catch (...) {
        release();
        started.set_exception(std::current_exception());
        return;
    }
    started.set_value();
    try {
        loop();
    } catch (const std::exception& error) {
        fail(error.what());
        return;
    } catch (...) {
        fail("the progress thread ended without a reason");
        return;
    }
    release();
}

// A device has failed, the machine refuses to let this thread wait, or an operation never ends. Only
// the end of this process proves running operations over, and the last event asks for it. Until then
// nothing is freed or destroyed: libraries that have failed hang or abort in their own
// clean-up.
void Engine::fail(const std::string& reason) {
    struct Remains {
        std::vector<std::unique_ptr<Peer>> peers;
        std::map<uint64_t, std::unique_ptr<Worker>> target_workers;
        std::unique_ptr<Worker> initiator;
        std::vector<std::shared_ptr<Memory>> regions;
        std::shared_ptr<Memory> probe;
        std::vector<char> probe_bytes;
        std::shared_ptr<Context> context;
    };
    {
        const std::lock_guard lock(mutex_);
        is_closed_ = true;
        failure_ = reason;
        // The regions are copied: Python's threads still ask for them.
        new Remains{std::move(peers_), std::move(target_workers_), std::move(initiator_), regions_,
                    probe_, std::move(probe_bytes_), std::move(context_)};
    }
    commands_.take();
    events_.push(Event{EventKind::engine_failed, 0, reason});
}

void Engine::start(const EngineSettings& settings) {
    if (settings.cuda_device >= 0) {
        use_primary_cuda_context(settings.cuda_device);
    }
    context_ = std::make_shared<Context>(settings);
    if (settings.has_network) {
        probe_bytes_.resize(Peer::PROBE_NBYTES_MAX);
        probe_ = Memory::enroll(context_, reinterpret_cast<uint64_t>(probe_bytes_.data()),
                                probe_bytes_.size(), UCS_MEMORY_TYPE_HOST);
    } else {
        // Nothing but a mapping reaches memory of the host then.
        probe_ = Memory::allocate(context_, Peer::PROBE_NBYTES_MAX);
    }
    initiator_ = std::make_unique<Worker>(context_);
    epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_fd_ < 0) {
        throw UcxError("epoll_create1: " + std::generic_category().message(errno));
    }
    watch(commands_.fd(), nullptr);
    watch(initiator_->event_fd(), initiator_.get());
}

void Engine::watch(int fd, Worker* worker) const {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = worker;
    if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
        throw UcxError("epoll_ctl: " + std::generic_category().message(errno));
    }
}

void Engine::loop() {
    auto busy_until = Clock::now();
    auto close_until = Clock::time_point::max();
    while (true) {
        bool is_busy = run_commands();
        if (is_closing()) {
            spare_files_.lend();
        }
        is_busy |= turn_peers();
        const bool has_progressed = progress_workers();
        is_busy |= has_progressed;
        if (!is_closing()) {
            spare_files_.take_back();
        }
        if (is_stopping_ && close_until == Clock::time_point::max()) {
            close_until = Clock::now() + CLOSE_PATIENCE;
            for (const auto& peer : peers_) {
                peer->disconnect();
            }
        }
        if (is_stopping_ && (peers_.empty() || Clock::now() > close_until)) {
            return;
        }
        // Only traffic over the network goes on by itself; a command is complete when its call returns.
        if (has_progressed) {
            busy_until = Clock::now() + std::chrono::microseconds(spin_us_);
        }
        const bool may_sleep = !is_busy && !has_news() && !is_stopping_;
        if (may_sleep && Clock::now() >= busy_until) {
            sleep();
        }
    }
}

bool Engine::run_commands() {
    const std::vector<CommandQueue::Command> commands = commands_.take();
    for (const auto& command : commands) {
        command();
    }
    return !commands.empty();
}

bool Engine::turn_peers() {
    bool moved = false;
    for (auto entry = peers_.begin(); entry != peers_.end();) {
        moved |= (*entry)->turn();
        if ((*entry)->is_gone()) {
            const std::lock_guard lock(mutex_);
            open_targets_.erase((*entry)->id());
            entry = peers_.erase(entry);
        } else {
            ++entry;
        }
    }
    return moved;
}

bool Engine::progress_workers() {
    bool moved = initiator_->progress();
    for (const auto& [id, worker] : target_workers_) {
        moved |= worker->progress();
    }
    return moved;
}

bool Engine::has_news() const {
    return std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) { return peer->has_news(); });
}

void Engine::sleep() {
    bool is_armed = initiator_->arm();
    for (const auto& [id, worker] : target_workers_) {
        is_armed &= worker->arm();
    }
    if (!is_armed || !commands_.begin_sleep()) {
        return;
    }
    std::array<epoll_event, EPOLL_EVENTS_MAX> events;
    const int patience_ms = is_closing() ? CLOSING_LOOK_MS : -1;
    const int ready = epoll_wait(epoll_fd_, events.data(), EPOLL_EVENTS_MAX, patience_ms);
    const int error = ready < 0 ? errno : 0;  // before anything else can overwrite it
    commands_.end_sleep();
    if (error != 0 && error != EINTR) {  // EINTR: this process was stopped and goes on
        throw UcxError("epoll_wait: " + std::generic_category().message(error));
    }
    for (int index = 0; index < ready; ++index) {
        if (auto* worker = static_cast<Worker*>(events[index].data.ptr)) {
            worker->touch();
        }
    }
}

bool Engine::is_closing() const {
    return std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) { return peer->is_closing(); });
}

Peer* Engine::find_peer(uint64_t id) {
    for (const auto& peer : peers_) {
        if (peer->id() == id) {
            return peer.get();
        }
    }
    return nullptr;
}

// The initiator's worker goes before its peers: destroying it ends whatever still calls back into them.
void Engine::release() {
    {
        const std::lock_guard lock(mutex_);
        is_closed_ = true;
    }
    commands_.take();  // an unanswered call gets std::future_error from its broken promise
    initiator_.reset();
    for (const auto& peer : peers_) {
        peer->abandon();
    }
    peers_.clear();
    target_workers_.clear();
    {
        const std::lock_guard lock(mutex_);
        regions_.clear();
    }
    probe_.reset();
    context_.reset();
    if (epoll_fd_ >= 0) {
        ::close(epoll_fd_);
    }
}

}  // namespace baton
