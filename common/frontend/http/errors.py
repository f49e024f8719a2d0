"""How a failed request is told to its client: status, headers and body, in its API's own shape.

Knows nothing of why it failed. Bad input is always 400, or 413 if it is too large: routers take 422
and 429 for failures of the server and retry them, five times and on both servers of a pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import orjson
from fastapi import Response

from common.errors import RequestError
from common.protocol.frontend import Failed

RETRY_AFTER_S = 1  # of a server that can't tell: one that waits longer may only idle it
RETRY_AFTER_MAX_S = 600
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status; others are the client's mistake below 500, and the server's above."""


class FailedRequest(RequestError):
    """The scheduler's `Failed` as the error of its request. kind: what a client may switch on.
    retry_after_s: 0.0 if it does not say."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message, status=failed.status)
        self.kind = failed.kind
        self.retry_after_s = failed.retry_after_s


def raise_failed(failures: Iterable[Failed | None]) -> None:
    """Raises: FailedRequest of the first failure, if there is one."""
    for failed in failures:
        if failed is not None:
            raise FailedRequest(failed)


def json_response(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


def error_response(path: str, error: RequestError) -> Response:
    """The answer to a request for `path` that ended in `error`.

    It is sent in chunks: a router that wraps the error of a stream in words of its own passes the
    length on as it was, and cuts its end off.
    """
    response = json_response(error_body(path, error), error.status)
    del response.headers["content-length"]
    if error.status == 503:
        response.headers["Retry-After"] = str(_retry_after_s(error))
    return response


def _retry_after_s(error: RequestError) -> int:
    told = error.retry_after_s if isinstance(error, FailedRequest) else 0.0
    return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_S, math.ceil(told)))


def error_body(path: str, error: RequestError) -> dict[str, object]:
    """Anthropic's shape for its routes, OpenAI's for others under /v1, and SGLang's for all else.
    Also used inside streams."""
    if is_anthropic(path):
        return anthropic_error(error)
    if not path.startswith("/v1/"):
        return {"error": {"message": error.message}}
    return {
        "error": {
            "message": error.message,
            "type": _openai_type(error.status),
            "param": error.field,
            "code": _openai_code(error),
        }
    }


def is_anthropic(path: str) -> bool:
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def anthropic_error(error: RequestError) -> dict[str, object]:
    kind = ANTHROPIC_TYPES.get(
        error.status, "api_error" if error.status >= 500 else "invalid_request_error"
    )
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _openai_type(status: int) -> str:
    match status:
        case 503:
            return "service_unavailable_error"
        case _ if status >= 500:
            return "server_error"
        case _:
            return "invalid_request_error"


def _openai_code(error: RequestError) -> str | None:
    if isinstance(error, FailedRequest):
        return error.kind
    if error.status == 404 and error.field == "model":
        return "model_not_found"
    return None
