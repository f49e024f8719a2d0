#include "batch.hpp"

#include <algorithm>

namespace baton {

namespace {

// Enough requests to cover a round trip of small puts, and few enough that a cancelled batch of large
// ones drains soon: 64 MiB is 1.3 ms of a 400 Gbit/s link.
constexpr uint64_t WINDOW_COUNT_MAX = 1024;
constexpr uint64_t WINDOW_COUNT_MIN = 4;
constexpr uint64_t WINDOW_NBYTES = 64ull << 20;

bool is_inside(int64_t offset, int64_t nbytes, uint64_t region_nbytes) {
    return offset >= 0 && nbytes >= 0 && static_cast<uint64_t>(nbytes) <= region_nbytes &&
           static_cast<uint64_t>(offset) <= region_nbytes - static_cast<uint64_t>(nbytes);
}

[[noreturn]] void refuse(const char* side, size_t run, int64_t region, int64_t offset, int64_t nbytes,
                         size_t region_count, uint64_t region_nbytes) {
    std::string text = std::string("run ") + std::to_string(run) + ": " + side +
                       " region=" + std::to_string(region) + " offset=" + std::to_string(offset) +
                       " nbytes=" + std::to_string(nbytes) + ": must lie in one of ";
    text += std::to_string(region_count) + " regions";
    if (region >= 0 && static_cast<size_t>(region) < region_count) {
        text += ", this one of " + std::to_string(region_nbytes) + " bytes";
    }
    throw PlanOutOfBounds(text);
}

}  // namespace

Batch::Batch(uint64_t tag, const PlanArrays& plan, const std::vector<Extent>& sources,
             const std::vector<Extent>& targets)
    : tag(tag), submitted_(std::chrono::steady_clock::now()) {
    runs.reserve(plan.run_count);
    uint64_t total = 0;
    for (size_t run = 0; run < plan.run_count; ++run) {
        const int64_t nbytes = plan.nbytes[run];
        const int64_t source = plan.source_region[run];
        const int64_t target = plan.target_region[run];
        const bool has_source = source >= 0 && static_cast<size_t>(source) < sources.size();
        const bool has_target = target >= 0 && static_cast<size_t>(target) < targets.size();
        const uint64_t source_nbytes = has_source ? sources[source].nbytes : 0;
        const uint64_t target_nbytes = has_target ? targets[target].nbytes : 0;
        if (!has_source || !is_inside(plan.source_offset[run], nbytes, source_nbytes)) {
            refuse("source", run, source, plan.source_offset[run], nbytes, sources.size(), source_nbytes);
        }
        if (!has_target || !is_inside(plan.target_offset[run], nbytes, target_nbytes)) {
            refuse("target", run, target, plan.target_offset[run], nbytes, targets.size(), target_nbytes);
        }
        if (nbytes > 0) {
            runs.push_back(Run{sources[source].address + plan.source_offset[run],
                               targets[target].address + plan.target_offset[run],
                               static_cast<uint64_t>(nbytes), static_cast<uint32_t>(source),
                               static_cast<uint32_t>(target)});
            total += static_cast<uint64_t>(nbytes);
        }
    }
    const uint64_t mean_nbytes = runs.empty() ? 1 : std::max<uint64_t>(1, total / runs.size());
    window = static_cast<uint32_t>(
        std::clamp(WINDOW_NBYTES / mean_nbytes, WINDOW_COUNT_MIN, WINDOW_COUNT_MAX));
}

void Batch::stop(const std::string& reason) {
    if (error_.empty()) {
        error_ = reason;
    }
}

Event Batch::settle(bool is_quiet) const {
    Event event{EventKind::transfer_settled, tag, error_};
    event.is_quiet = is_quiet;
    event.nbytes = issued_nbytes;
    event.runs = static_cast<int64_t>(next);
    event.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - submitted_).count();
    event.issue_seconds = issue_seconds;
    return event;
}

}  // namespace baton
