"""The HTTP application: routes put together, a limit on bodies, and every error answered as JSON.

Knows nothing of what the routes do.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.config import ServerConfig
from common.errors import RequestError
from common.frontend.apis.openapi import PATH, DescribedApp
from common.frontend.context import FrontendContext
from common.frontend.http.api_keys import ApiKeys, KeyCheck
from common.frontend.http.direct_routes import DirectRoutes
from common.frontend.http.errors import error_response
from common.frontend.http.headers import GivenHeaders, headers_of
from common.frontend.http.origins import OriginCheck, Origins

HEADERS_NBYTES_MAX = 1 << 16  # request line and headers of one request
CONTENT_LENGTH_DIGITS_MAX = 19  # 2**63; Python refuses to read numbers of thousands of digits

logger = logging.getLogger(__name__)


def build_app(context: FrontendContext, routers: Sequence[APIRouter]) -> FastAPI:
    """The application of one server; the server of it also runs `context.scheduler.run()`."""
    app = DescribedApp(
        title="Baton",
        openapi_url=PATH,
        docs_url=None,
        redoc_url=None,
        # FastAPI's own spans, which a global provider or FASTAPI_OTEL_AUTO_CONFIGURE would turn on,
        # would tell of a request a second time, and asking for them costs each request.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    for router in routers:
        app.include_router(router)
    add_error_answers(app, routers)
    app.add_middleware(LastResort)  # before FastAPI answers an exception in its own way
    app.put_in_front(lambda behind: _in_front(context.config, DirectRoutes(behind, routers)))
    return app


def _in_front(config: ServerConfig, app: ASGIApp) -> ASGIApp:
    """What a request passes before it is answered."""
    app = SizeLimits(app, config.max_body_nbytes)
    app = OriginCheck(app, Origins(config))
    app = KeyCheck(app, ApiKeys(config))
    if config.allowed_origins:
        # Outside the check of keys: a browser asks first (OPTIONS), and shows none with that.
        app = CORSMiddleware(
            app, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return LastResort(app)


def add_error_answers(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Answer whatever a route raises on purpose as JSON."""

    @app.exception_handler(RequestError)
    async def answer_request_error(request: Request, error: RequestError) -> Response:
        return error_response(request.url.path, error)

    @app.exception_handler(RequestValidationError)
    async def answer_invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        return error_response(
            request.url.path, RequestError(f"{field}: {first['msg']}", field=field or None)
        )

    @app.exception_handler(HTTPException)
    async def answer_http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        message = f"{request.method} {path}: {str(error.detail).lower()}"
        response = error_response(path, RequestError(message, status=error.status_code))
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["Allow"] = ", ".join(methods_of(routers, path))
        return response


def methods_of(routers: Sequence[APIRouter], path: str) -> list[str]:
    """Of all routes of a path; the router's own answer names those of the first one."""
    routes = [route for router in routers for route in router.routes if isinstance(route, Route)]
    found = (route.methods or () for route in routes if route.path_regex.match(path))
    return sorted({method for methods in found for method in methods})


class SizeLimits:
    """Answers 413 to a body of more than `body_nbytes_max` bytes, said or sent, 431 to headers of
    more than HEADERS_NBYTES_MAX, and 400 to a body whose length is said in two ways."""

    def __init__(self, app: ASGIApp, body_nbytes_max: int) -> None:
        self._app = app
        self._nbytes_max = body_nbytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = _check_headers(scope) or self._check_said(headers_of(scope))
        if error is not None:
            response = error_response(scope["path"], error)
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        received_nbytes = 0

        async def receive_counted() -> Message:
            nonlocal received_nbytes
            message = await receive()
            received_nbytes += len(message.get("body", b""))
            if received_nbytes > self._nbytes_max:
                raise self._too_large("more")
            return message

        await self._app(scope, receive_counted, send)

    def _check_said(self, headers: GivenHeaders) -> RequestError | None:
        said = headers.get("content-length", "0")
        if "content-length" in headers and "transfer-encoding" in headers:
            # Proxies differ in which of them counts, and so in where the next request begins.
            return RequestError("Content-Length and Transfer-Encoding: only one may be given")
        if not (said.isascii() and said.isdecimal()):
            return RequestError(f"Content-Length {said[:32]!r}: must be a number")
        if len(said) > CONTENT_LENGTH_DIGITS_MAX or int(said) > self._nbytes_max:
            return self._too_large(f"{said[:CONTENT_LENGTH_DIGITS_MAX]} bytes")
        return None

    def _too_large(self, found: str) -> RequestError:
        return RequestError(
            f"the body has {found}; at most {self._nbytes_max} bytes are read (--max-body-bytes)",
            status=413,
        )


def _check_headers(scope: Scope) -> RequestError | None:
    """The server's own bound holds only for what comes in pieces."""
    nbytes = len(scope["path"]) + len(scope["query_string"])
    nbytes += sum(len(name) + len(value) for name, value in scope["headers"])
    if nbytes <= HEADERS_NBYTES_MAX:
        return None
    return RequestError(
        f"request line and headers have {nbytes} bytes; at most {HEADERS_NBYTES_MAX} are read",
        status=431,
    )


class LastResort:
    """Turns an exception that nothing else took, a mistake of ours, into a 500 and one log line.

    A response that has already begun is cut off instead, so that no client takes it for whole.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def send_watched(message: Message) -> None:
            nonlocal is_started
            is_started = is_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        except Exception as exc:
            if scope["type"] != "http" or is_started:
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            error = RequestError(f"internal error: {type(exc).__name__}", status=500)
            await error_response(scope["path"], error)(scope, receive, send)
