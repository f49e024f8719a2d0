#include "endpoint.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>

#include "channel.hpp"

namespace baton {

Endpoint endpoint_of(const std::string& host, uint16_t port) {
    Endpoint endpoint;
    auto* v4 = reinterpret_cast<sockaddr_in*>(&endpoint.address);
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&endpoint.address);
    if (inet_pton(AF_INET, host.c_str(), &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons(port);
        endpoint.nbytes = sizeof(*v4);
    } else if (inet_pton(AF_INET6, host.c_str(), &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = htons(port);
        endpoint.nbytes = sizeof(*v6);
    } else {
        throw StreamError("host " + host + ": must be an IP address");
    }
    return endpoint;
}

uint16_t port_of(int fd) {
    sockaddr_storage address{};
    socklen_t nbytes = sizeof(address);
    getsockname(fd, reinterpret_cast<sockaddr*>(&address), &nbytes);
    return ntohs(address.ss_family == AF_INET ? reinterpret_cast<sockaddr_in&>(address).sin_port
                                              : reinterpret_cast<sockaddr_in6&>(address).sin6_port);
}

}  // namespace baton
