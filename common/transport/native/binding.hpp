// Arguments and results of both Python modules: plans, and lists of events.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>
#include <vector>

#include "batch.hpp"
#include "queues.hpp"

namespace baton {

using Int64Array = nanobind::ndarray<const int64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

inline nanobind::bytes to_bytes(const std::string& text) { return nanobind::bytes(text.data(), text.size()); }

inline PlanArrays to_plan(const Int64Array& source_region, const Int64Array& source_offset,
                          const Int64Array& target_region, const Int64Array& target_offset,
                          const Int64Array& nbytes) {
    const size_t run_count = nbytes.size();
    for (const Int64Array* array : {&source_region, &source_offset, &target_region, &target_offset}) {
        if (array->size() != run_count) {
            throw PlanOutOfBounds("the five arrays of a plan must have one length");
        }
    }
    return {source_region.data(), source_offset.data(), target_region.data(),
            target_offset.data(), nbytes.data(),        run_count};
}

inline nanobind::list to_list(const std::vector<Event>& events) {
    nanobind::list list;
    for (const Event& event : events) {
        list.append(nanobind::make_tuple(static_cast<int>(event.kind), event.id, event.text, event.is_quiet,
                                         event.nbytes, event.runs, event.seconds, event.issue_seconds));
    }
    return list;
}

}  // namespace baton
