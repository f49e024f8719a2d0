// TLS 1.3 with an external key: both ends prove that they know the secret of a target, which only the
// control channel carries. There are no certificates to parse and nothing to answer strangers with.
#pragma once

#include <openssl/ssl.h>

#include <functional>
#include <memory>
#include <optional>

#include "wire.hpp"

namespace baton {

struct SslDelete {
    void operator()(SSL* ssl) const { SSL_free(ssl); }
};
using SslPtr = std::unique_ptr<SSL, SslDelete>;

// For connections that are accepted. `find` is asked for the secret of the target that a client names.
class TlsServer {
public:
    using Find = std::function<std::optional<Secret>(const TargetId&)>;
    explicit TlsServer(Find find);
    ~TlsServer();
    TlsServer(const TlsServer&) = delete;
    TlsServer& operator=(const TlsServer&) = delete;
    // `named` is set to the target that the client proved to know the secret of.
    SslPtr open(TargetId* named) const;

private:
    static int on_key(SSL* ssl, const unsigned char* identity, size_t nbytes, SSL_SESSION** session);

    Find find_;
    SSL_CTX* context_;
};

// For connections that are made.
class TlsClient {
public:
    TlsClient();
    ~TlsClient();
    TlsClient(const TlsClient&) = delete;
    TlsClient& operator=(const TlsClient&) = delete;
    struct Key {
        TargetId target;
        Secret secret;
    };
    // `key` outlives the handshake.
    SslPtr open(Key* key) const;

private:
    static int on_key(SSL* ssl, const EVP_MD* digest, const unsigned char** identity, size_t* nbytes,
                      SSL_SESSION** session);

    SSL_CTX* context_;
};

// OpenSSL's text for the last failure on this thread, which is cleared.
std::string tls_failure(const SSL* ssl, int result);

}  // namespace baton
