#include "tls.hpp"

#include <openssl/err.h>

#include <cstring>
#include <new>
#include <string>

namespace baton {

namespace {

// AES is in the processor wherever this runs fast; a session's cipher names the digest of its key.
const char* const CIPHERS = "TLS_AES_128_GCM_SHA256";
const unsigned char CIPHER_ID[] = {0x13, 0x01};
constexpr size_t READ_AHEAD_NBYTES = 256 << 10;

SSL_CTX* make_context(const SSL_METHOD* method) {
    SSL_CTX* context = SSL_CTX_new(method);
    if (context == nullptr) {
        throw std::bad_alloc();
    }
    SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION);
    SSL_CTX_set_ciphersuites(context, CIPHERS);
    SSL_CTX_set_num_tickets(context, 0);
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_read_ahead(context, 1);
    SSL_CTX_set_default_read_buffer_len(context, READ_AHEAD_NBYTES);
    return context;
}

// The form in which OpenSSL takes an external key. Null if there is no memory.
SSL_SESSION* session_of(SSL* ssl, const Secret& secret) {
    SSL_SESSION* session = SSL_SESSION_new();
    const SSL_CIPHER* cipher = SSL_CIPHER_find(ssl, CIPHER_ID);
    if (session != nullptr && cipher != nullptr &&
        SSL_SESSION_set1_master_key(session, secret.data(), secret.size()) == 1 &&
        SSL_SESSION_set_cipher(session, cipher) == 1 &&
        SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) == 1) {
        return session;
    }
    SSL_SESSION_free(session);
    return nullptr;
}

SslPtr make_ssl(SSL_CTX* context) {
    SslPtr ssl(SSL_new(context));
    if (ssl == nullptr) {
        throw std::bad_alloc();
    }
    return ssl;
}

}  // namespace

TlsServer::TlsServer(Find find) : find_(std::move(find)), context_(make_context(TLS_server_method())) {
    SSL_CTX_set_app_data(context_, this);
    SSL_CTX_set_psk_find_session_callback(context_, on_key);
}

TlsServer::~TlsServer() { SSL_CTX_free(context_); }

SslPtr TlsServer::open(TargetId* named) const {
    SslPtr ssl = make_ssl(context_);
    SSL_set_app_data(ssl.get(), named);
    SSL_set_accept_state(ssl.get());
    return ssl;
}

// A session is made resumable by no ticket, so whatever names itself otherwise finds no key, and as there
// is no certificate either, the handshake ends.
int TlsServer::on_key(SSL* ssl, const unsigned char* identity, size_t nbytes, SSL_SESSION** session) {
    const auto* server = static_cast<const TlsServer*>(SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl)));
    *session = nullptr;
    if (nbytes != TARGET_ID_NBYTES) {
        return 1;
    }
    auto* named = static_cast<TargetId*>(SSL_get_app_data(ssl));
    std::memcpy(named->data(), identity, nbytes);
    const std::optional<Secret> secret = server->find_(*named);
    if (secret) {
        *session = session_of(ssl, *secret);
    }
    return 1;
}

TlsClient::TlsClient() : context_(make_context(TLS_client_method())) {
    SSL_CTX_set_psk_use_session_callback(context_, on_key);
    // A client without the secret has no certificate that would count either.
    SSL_CTX_set_verify(context_, SSL_VERIFY_PEER, nullptr);
}

TlsClient::~TlsClient() { SSL_CTX_free(context_); }

SslPtr TlsClient::open(Key* key) const {
    SslPtr ssl = make_ssl(context_);
    SSL_set_app_data(ssl.get(), key);
    SSL_set_connect_state(ssl.get());
    return ssl;
}

int TlsClient::on_key(SSL* ssl, const EVP_MD*, const unsigned char** identity, size_t* nbytes,
                      SSL_SESSION** session) {
    const auto* key = static_cast<const Key*>(SSL_get_app_data(ssl));
    *session = session_of(ssl, key->secret);
    *identity = key->target.data();
    *nbytes = key->target.size();
    return *session != nullptr;
}

std::string tls_failure(const SSL* ssl, int result) {
    const int kind = SSL_get_error(ssl, result);
    const unsigned long code = ERR_get_error();
    ERR_clear_error();
    if (code != 0) {
        const char* reason = ERR_reason_error_string(code);
        return std::string("TLS: ") + (reason != nullptr ? reason : "error " + std::to_string(code));
    }
    return kind == SSL_ERROR_ZERO_RETURN ? "the peer closed the connection" : "TLS: the connection broke";
}

}  // namespace baton
