"""Which web pages may use this server: checks of `Host`, `Origin` and the type of a body.

A browser lets any page send some requests to any address, a server on the visitor's own machine
included, although the page can't read the answers. And a page whose name is made to resolve to this
machine (DNS rebinding) may read them too. Three rules close both ways, none of which concerns a
program that is no browser:

- A server that listens on a loopback address answers only to the names of this machine.
- A request of a page from elsewhere is refused, unless it shows a key, which a browser does not
  attach by itself, or its origin is one of `--allowed-origins`.
- A body must be JSON by its type: a browser sends that to another origin only if it is allowed to.

Source: Fetch standard, "CORS-safelisted request-header" and "Sec-Fetch-Site" (W3C Fetch Metadata).
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from common.config import ServerConfig
from common.errors import RequestError
from common.frontend.http.api_keys import shown_key
from common.frontend.http.errors import error_response
from common.frontend.http.headers import GivenHeaders, headers_of

ANY_ORIGIN = "*"
SHOWN_MAX = 128  # characters of a client's header that are repeated in an error


class Origins:
    """What one server allows. Compares names only; nothing is looked up."""

    def __init__(self, config: ServerConfig) -> None:
        self._hosts = frozenset(host.lower() for host in config.allowed_hosts)
        self._origins = frozenset(origin.lower() for origin in config.allowed_origins)
        self._is_loopback = _is_loopback(config.host)

    def why_refused(self, scope: Scope, headers: GivenHeaders) -> RequestError | None:
        """Why a request is not answered; None if it is."""
        return (
            self._check_host(headers) or self._check_origin(scope, headers) or _check_type(headers)
        )

    def _check_host(self, headers: GivenHeaders) -> RequestError | None:
        host = headers.get("host")
        name = _name_of(host)
        if not name or not (self._is_loopback or self._hosts):
            return None
        if name in self._hosts or _is_of_this_machine(name):
            return None
        return RequestError(
            f"Host {host[:SHOWN_MAX]!r}: must be localhost, an IP address or one of "
            f"--allowed-hosts ({', '.join(sorted(self._hosts)) or 'none'})",
            status=421,
        )

    def _check_origin(self, scope: Scope, headers: GivenHeaders) -> RequestError | None:
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if shown_key(headers) or site in ("same-origin", "none"):
            return None
        if ANY_ORIGIN in self._origins or origin.lower() in self._origins:
            return None
        is_foreign = bool(origin) and _authority(origin) != headers.get("host").lower()
        if not is_foreign and (site != "cross-site" or _is_link(scope, headers)):
            return None
        return RequestError(
            f"Origin {origin[:SHOWN_MAX]!r}: a page from elsewhere may use this server with a "
            "bearer key, or if its origin is one of --allowed-origins",
            status=403,
        )


def _check_type(headers: GivenHeaders) -> RequestError | None:
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    said = headers.get("content-type")
    kind = said.partition(";")[0].strip().lower()
    if not has_body or kind == "application/json" or kind.endswith("+json"):
        return None
    return RequestError(
        f"Content-Type {said[:SHOWN_MAX]!r}: must be application/json",
        status=415,
    )


def _is_link(scope: Scope, headers: GivenHeaders) -> bool:
    """Whether a browser follows a link to a page here. Reading changes nothing."""
    is_navigation = headers.get("sec-fetch-mode") == "navigate"
    is_whole_page = headers.get("sec-fetch-dest") == "document"
    return scope["method"] in ("GET", "HEAD") and is_navigation and is_whole_page


def _authority(origin: str) -> str:
    """The "host:port" of an origin, as a browser writes it in `Host`; "" for `null`."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # brackets that hold no IPv6 address
        return ""


def _name_of(host: str) -> str:
    """The name or address in a `Host` header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_of_this_machine(name: str) -> bool:
    """An address is never what a page's own name resolved to, so any will do."""
    return name == "localhost" or name.endswith(".localhost") or _address(name) is not None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host.lower() == "localhost" or (address is not None and address.is_loopback)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


class OriginCheck:
    """Refuses what `Origins` refuses, before a body is read."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._origins.why_refused(scope, headers_of(scope))
            if error is not None:
                response = error_response(scope["path"], error)
                # The body was not read, so nothing else can come over this connection.
                response.headers["Connection"] = "close"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
