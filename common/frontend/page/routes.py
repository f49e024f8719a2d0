"""GET /: one page that shows what the server does now and takes a prompt, and GET /state, which the
page asks for once a second.

Knows nothing of how the page looks: that is `static`, files without any outside assets.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Response

from common.frontend.context import FrontendContext
from common.frontend.http.answers import answered_as
from common.frontend.http.errors import json_response
from common.frontend.page.files import HEADERS, PageFile, read_page_files
from common.frontend.page.state import page_state


def build_router(context: FrontendContext) -> APIRouter:
    router = APIRouter()
    for path, file in read_page_files().items():
        router.add_api_route(
            path,
            _sender(file),
            methods=["GET", "HEAD"],
            response_class=Response,
            responses=answered_as(file.content_type),
        )

    @router.get("/state")
    async def state() -> Response:
        response = json_response(await page_state(context))
        response.headers["Cache-Control"] = "no-store"
        return response

    return router


def _sender(file: PageFile) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(file.content, media_type=file.content_type, headers=HEADERS)

    return send
