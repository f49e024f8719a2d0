// Numeric addresses as the kernel takes them.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

namespace baton {

struct Endpoint {
    sockaddr_storage address{};
    socklen_t nbytes = 0;
};

// Throws StreamError if the host is no IP address.
Endpoint endpoint_of(const std::string& host, uint16_t port);
uint16_t port_of(int fd);

}  // namespace baton
