"""Who may ask: the keys that clients show, compared in constant time, and what needs none.

Knows nothing of what the routes do but their paths. Runs before a body is read.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from common.config import ServerConfig
from common.errors import RequestError
from common.frontend.http.errors import anthropic_error, is_anthropic, json_response
from common.frontend.http.headers import GivenHeaders, headers_of
from common.frontend.page.files import PAGE_PATHS

# What load balancers, probes and scrapers ask for, as SGLang leaves it open, and the page's files,
# which hold nothing by themselves: its data comes from /state.
OPEN_PATHS = PAGE_PATHS | {"/health", "/health_generate", "/ready", "/ping", "/metrics"}
# What changes the state of the server for others than the one who asks.
ADMIN_PATHS = frozenset(
    {
        "/abort_request",
        "/continue_generation",
        "/drain",
        "/flush_cache",
        "/pause_generation",
        "/resume",
        "/switch_role",
        "/update_weight_version",
        "/update_weights_from_disk",
    }
)
# The same, of paths that others may look at.
CHANGED_PATHS = frozenset({"/peers"})
READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
CLIENT_DIGITS = 16  # of a digest that tells clients apart, and proves nothing


def is_for_admins(method: str, path: str) -> bool:
    is_change = path in CHANGED_PATHS and method not in READING_METHODS
    return is_change or path in ADMIN_PATHS


class ApiKeys:
    """The keys of one server, kept as digests: comparing takes as long for any key shown."""

    def __init__(self, config: ServerConfig) -> None:
        self._admin = [_digest(key) for key in config.admin_api_keys]
        self._any = [_digest(key) for key in config.api_keys]

    def allows(self, method: str, path: str, shown: str) -> bool:
        """Whether a client that shows a key, "" for none, may ask for a path so."""
        if path in OPEN_PATHS:
            return True
        if is_for_admins(method, path) and self._admin:
            return _is_among(shown, self._admin)
        return not self._any or _is_among(shown, [*self._any, *self._admin])


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_among(shown: str, digests: Iterable[bytes]) -> bool:
    """All are compared, so that the time tells nothing of which one it was."""
    digest = _digest(shown)
    return sum(hmac.compare_digest(digest, known) for known in digests) > 0


def client_of(headers: GivenHeaders, config: ServerConfig) -> str:
    """The name of a client among those that wait: of the key that it shows, a digest, which says
    nothing of the key; "" where no keys are asked for. Equal on all servers."""
    shown = shown_key(headers) if config.api_keys else ""
    named = b"client " + shown.encode("utf-8", "surrogateescape")
    return sha256(named).hexdigest()[:CLIENT_DIGITS] if shown else ""


def shown_key(headers: GivenHeaders) -> str:
    """The key in `Authorization: Bearer KEY`, or else in `x-api-key`, as Anthropic's clients show
    it; "" without one. Two headers of one name are none."""
    given = headers.all("authorization")
    scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    bare = headers.all("x-api-key")
    return bare[0].strip() if len(bare) == 1 else ""


class KeyCheck:
    """Answers 401 to a request without a key that opens what it asks for."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            shown = shown_key(headers_of(scope))
            method, path = scope["method"], scope["path"]
            if not self._keys.allows(method, path, shown):
                await _refusal(method, path, shown)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _refusal(method: str, path: str, shown: str) -> ASGIApp:
    """In OpenAI's shape on every path but Anthropic's: it contains SGLang's. The key is not
    repeated."""
    what = "an admin key" if is_for_admins(method, path) else "an API key"
    found = "the one shown is not valid here" if shown else "none was shown"
    message = f"{path} needs {what} as `Authorization: Bearer KEY` or `x-api-key: KEY`; {found}"
    error = {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }
    content: dict[str, object] = {"error": error}
    if is_anthropic(path):
        content = anthropic_error(RequestError(message, status=401))
    response = json_response(content, 401)
    response.headers["WWW-Authenticate"] = "Bearer"
    # The body was not read, so nothing else can come over this connection.
    response.headers["Connection"] = "close"
    return response
