// File descriptors kept free for UCX while it closes something.
#pragma once

#include <vector>

namespace baton {

// UCX asks a socket about a network device when it closes an endpoint, and aborts the process if there is
// no descriptor left for one. A process that has run out of them could not even lose a peer. Another
// thread may take a lent descriptor; that is a matter of microseconds, in a process that opens few files.
class SpareFiles {
public:
    SpareFiles() { take_back(); }
    ~SpareFiles() { lend(); }
    SpareFiles(const SpareFiles&) = delete;
    SpareFiles& operator=(const SpareFiles&) = delete;

    // Both are cheap where there is nothing to do. A descriptor that can't be taken back is tried again
    // next time.
    void lend();
    void take_back();

private:
    std::vector<int> files_;
};

}  // namespace baton
