"""Routes that are found by one look-up: those of a plain path that take the request or nothing.

FastAPI compares a request with one route after another, and asks for dependencies that no route
here has; together that costs as much as reading a short body. It still answers what is left:
paths with parameters, methods and paths that are not there, and its document of all routes.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import RequestError
from common.frontend.http.errors import error_response

Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """Answers what `routers` have direct routes for; the rest is for `app`."""

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter]) -> None:
        self._app = app
        self._endpoints: dict[tuple[str, str], Endpoint] = {}
        routes = [route for router in routers for route in router.routes]
        for route in routes:
            if isinstance(route, APIRoute) and (endpoint := _direct(route)) is not None:
                for method in route.methods or ():
                    self._endpoints.setdefault((method, route.path), endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        endpoint = self._endpoints.get((scope["method"], scope["path"])) if is_http else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)
        except RequestError as error:
            await error_response(scope["path"], error)(scope, receive, send)


def _direct(route: APIRoute) -> Endpoint | None:
    """What answers a route that FastAPI has nothing to find out for; None of others."""
    if "{" in route.path:
        return None
    answer: Callable[..., Awaitable[Response]] = route.endpoint
    match list(inspect.signature(answer).parameters):
        case []:
            return lambda request: answer()
        case ["request"]:
            return answer
    return None
