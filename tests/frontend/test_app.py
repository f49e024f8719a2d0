"""Whatever goes wrong, a client gets JSON in its API's shape, and the right status."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from common.errors import RequestError
from common.frontend.context import FrontendContext
from common.frontend.http.errors import FailedRequest, error_body, error_response
from common.protocol.frontend import Failed
from tests.frontend.frontend_rig import BASE_PARTS, Rig, run_with_rig


def odd_routes(context: FrontendContext) -> APIRouter:
    """Routes that end in every way a route can."""
    router = APIRouter()

    @router.post("/generate")
    @router.post("/v1/completions")
    async def length(request: Request) -> Response:
        return Response(str(len(await request.body())))

    @router.get("/bug")
    @router.get("/v1/bug")
    async def bug() -> Response:
        assert context.config.port == 0, "a secret detail"
        return Response()

    @router.get("/v1/field")
    async def field() -> Response:
        raise RequestError("top_p=2: must be in 0..1", field="top_p")

    @router.get("/number")
    async def number(n: int) -> Response:
        return Response(str(n))

    @router.get("/broken-stream")
    async def broken_stream() -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"data: one\n\n"
            raise RuntimeError("halfway")

        return StreamingResponse(parts())

    return router


PARTS = (*BASE_PARTS, odd_routes)
LIMIT = 100_000  # the rig's --max-body-bytes


def test_an_unknown_route_is_a_404_in_the_shape_of_its_api(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        plain = await rig.http.get("/nothing")
        assert plain.status_code == 404
        assert plain.json() == {"error": {"message": "GET /nothing: not found"}}
        openai = await rig.http.post("/v1/nothing")
        assert openai.status_code == 404
        assert openai.json()["error"] == {
            "message": "POST /v1/nothing: not found",
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        }

    run_with_rig(tmp_path, story, parts=PARTS)


def test_a_wrong_method_is_a_405_that_names_the_allowed_ones(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        reply = await rig.http.post("/health")
        assert reply.status_code == 405 and "GET" in reply.headers["allow"]
        assert reply.json()["error"]["message"] == "POST /health: method not allowed"

    run_with_rig(tmp_path, story, parts=PARTS)


def test_a_request_error_names_its_field_on_openai_routes(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        reply = await rig.http.get("/v1/field")
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "top_p"

    run_with_rig(tmp_path, story, parts=PARTS)


def test_a_wrong_query_parameter_is_400_and_never_422(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for query in ("", "?n=x"):
            reply = await rig.http.get(f"/number{query}")
            assert reply.status_code == 400
            assert reply.json()["error"]["message"].startswith("n: ")

    run_with_rig(tmp_path, story, parts=PARTS)


@pytest.mark.parametrize("path", ["/bug", "/v1/bug"])
def test_our_own_mistake_is_a_500_with_one_log_line_and_no_details(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(rig: Rig) -> None:
        reply = await rig.http.get(path)
        assert reply.status_code == 500
        assert reply.json()["error"]["message"] == "internal error: AssertionError"
        assert (await rig.http.get("/ping")).status_code == 200, "the server goes on"

    with caplog.at_level(logging.ERROR):
        run_with_rig(tmp_path, story, parts=PARTS)
    (record,) = caplog.records
    assert record.getMessage() == f"GET {path} failed"
    assert record.exc_info is not None


def test_a_stream_that_breaks_is_cut_off_and_not_taken_for_whole(tmp_path: Path) -> None:
    """What had begun as a 200 has no second status line: the connection itself must fail."""

    async def story(rig: Rig) -> None:
        sent: list[str] = []

        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, object]) -> None:
            sent.append(str(message["type"]))
            assert not (message["type"] == "http.response.body" and not message.get("more_body"))

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "method": "GET",
            "path": "/broken-stream",
            "query_string": b"",
            "headers": [],
        }
        with pytest.raises(RuntimeError, match="halfway"):
            await rig.app(scope, receive, send)  # type: ignore[arg-type]
        assert sent == ["http.response.start", "http.response.body"]

    run_with_rig(tmp_path, story, parts=PARTS)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_body_up_to_the_limit_is_read_and_a_larger_one_is_413(tmp_path: Path, path: str) -> None:
    async def chunks(nbytes: int) -> AsyncIterator[bytes]:
        for _ in range(nbytes // 1000):
            yield b"x" * 1000
        yield b"x" * (nbytes % 1000)

    async def story(rig: Rig) -> None:
        for body in (b"x" * LIMIT, chunks(LIMIT)):
            reply = await rig.http.post(path, content=body)
            assert (reply.status_code, reply.text) == (200, str(LIMIT))
        for too_large in (b"x" * (LIMIT + 1), chunks(LIMIT + 1)):
            reply = await rig.http.post(path, content=too_large)
            assert reply.status_code == 413
            message = reply.json()["error"]["message"]
            assert str(LIMIT) in message and "--max-body-bytes" in message

    run_with_rig(tmp_path, story, parts=PARTS)


@pytest.mark.parametrize(
    ("said", "status"), [("-1", 400), ("1e3", 400), ("x", 400), ("9" * 30, 413), ("9" * 9000, 413)]
)
def test_a_nonsense_content_length_is_refused(tmp_path: Path, said: str, status: int) -> None:
    async def story(rig: Rig) -> None:
        reply = await rig.http.post("/generate", content=b"x", headers={"Content-Length": said})
        assert reply.status_code == status
        assert reply.headers["connection"] == "close"

    run_with_rig(tmp_path, story, parts=PARTS)


def test_headers_beyond_the_bound_are_431(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for nbytes, status in ((60_000, 200), (70_000, 431)):
            reply = await rig.http.get("/ping", headers={"X-Long": "x" * nbytes})
            assert reply.status_code == status

    run_with_rig(tmp_path, story)


def test_a_full_queue_is_a_503_with_retry_after() -> None:
    error = FailedRequest(Failed(1, 503, "queue_full", "64 requests wait; at most 64 may"))
    reply = error_response("/v1/chat/completions", error)
    assert (reply.status_code, reply.headers["Retry-After"]) == (503, "1")
    assert error_body("/v1/chat/completions", error) == {
        "error": {
            "message": "64 requests wait; at most 64 may",
            "type": "service_unavailable_error",
            "param": None,
            "code": "queue_full",
        }
    }
    assert error_body("/generate", error) == {
        "error": {"message": "64 requests wait; at most 64 may"}
    }


@pytest.mark.parametrize(("told_s", "header"), [(0.2, "1"), (12.3, "13"), (1e9, "600")])
def test_a_server_that_knows_when_it_has_time_says_so(told_s: float, header: str) -> None:
    failed = Failed(1, 503, "overloaded", "9 requests are waiting", retry_after_s=told_s)
    reply = error_response("/generate", FailedRequest(failed))
    assert reply.headers["Retry-After"] == header


def test_only_503_asks_to_try_again() -> None:
    for status in (400, 404, 499, 500):
        assert "Retry-After" not in error_response("/x", RequestError("no", status=status)).headers
