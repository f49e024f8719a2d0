"""Which routes are found by one look-up, and that the others are still answered."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request, Response

from common.errors import RequestError
from common.frontend.http.direct_routes import DirectRoutes


def make_app() -> FastAPI:
    """Its routes answer with their names; what is not answered directly says so."""
    router = APIRouter()

    @router.post("/body")
    async def body(request: Request) -> Response:
        return Response(await request.body())

    @router.get("/plain")
    async def plain() -> Response:
        return Response("plain")

    @router.get("/refused")
    async def refused() -> Response:
        raise RequestError("no such thing", status=404)

    @router.get("/query")
    async def query(n: int) -> Response:
        return Response(str(n))

    @router.get("/path/{name}")
    async def path(name: str) -> Response:
        return Response(name)

    @router.get("/plain")
    async def later() -> Response:
        return Response("the first one counts")

    app = FastAPI()
    app.include_router(router)

    @app.middleware("http")
    async def mark(request: Request, call_next: object) -> Response:
        response: Response = await call_next(request)  # type: ignore[operator]
        response.headers["by"] = "FastAPI"
        return response

    app.add_middleware(DirectRoutes, routers=[router])
    return app


@pytest.mark.parametrize(
    ("method", "path", "status", "text", "is_direct"),
    [
        ("POST", "/body", 200, "sent", True),
        ("GET", "/plain", 200, "plain", True),
        ("GET", "/refused", 404, '{"error":{"message":"no such thing"}}', True),
        ("GET", "/query?n=7", 200, "7", False),
        ("GET", "/path/here", 200, "here", False),
        ("GET", "/body", 405, '{"detail":"Method Not Allowed"}', False),
        ("GET", "/plain/", 307, "", False),
        ("GET", "/nothing", 404, '{"detail":"Not Found"}', False),
    ],
)
def test_plain_paths_are_answered_directly_and_the_rest_by_fastapi(
    method: str, path: str, status: int, text: str, is_direct: bool
) -> None:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=make_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.request(method, path, content=b"sent" if method == "POST" else None)

    reply = asyncio.run(ask())
    assert (reply.status_code, reply.text) == (status, text)
    assert ("by" not in reply.headers) == is_direct
