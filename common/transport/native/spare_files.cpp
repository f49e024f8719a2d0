#include "spare_files.hpp"

#include <fcntl.h>
#include <unistd.h>

namespace baton {

namespace {

constexpr size_t SPARE_FILES = 4;

}  // namespace

void SpareFiles::lend() {
    for (const int file : files_) {
        ::close(file);
    }
    files_.clear();
}

void SpareFiles::take_back() {
    while (files_.size() < SPARE_FILES) {
        const int file = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (file < 0) {
            return;
        }
        files_.push_back(file);
    }
}

}  // namespace baton
