"""From an HTTP request to a checked call: reads the body, names the request.

Large bodies are parsed, checked and tokenised on another thread, so that other streams go on.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from common.errors import RequestError
from common.frontend.fields import JsonObject, parse_object
from common.frontend.spans import trace_parent_of

T = TypeVar("T")

# Tokenising runs at a few MB/s: below this size it costs less than a millisecond or two.
LARGE_BODY_NBYTES = 4096
NAME_PATTERN = re.compile(r"[!-~]{1,128}")  # printable, short enough to show in every reply


async def read_call(request: Request, check: Callable[[JsonObject], T]) -> T:
    """What `check` makes of the body. Raises: RequestError if it is no JSON object, or from it."""
    try:
        body = await request.body()
    except ClientDisconnect as exc:
        raise RequestError("the client went away while it sent the body") from exc
    if len(body) < LARGE_BODY_NBYTES:
        return check(parse_object(body))
    return await asyncio.to_thread(lambda: check(parse_object(body)))


def trace_parent(request: Request) -> str:
    """The span that a request belongs to, as its client says in `traceparent`; "" for none."""
    return trace_parent_of(request.headers.getlist("traceparent"))


def request_name(request: Request, prefix: str = "") -> str:
    """A fresh name for a request, with the first X-Request-Id in it if that can be shown.

    Never the header alone: clients send it again when they retry, and proxies send it twice.
    """
    name = request.headers.get("x-request-id", "").strip()
    if NAME_PATTERN.fullmatch(name):
        return f"{prefix}{name}-{secrets.token_hex(4)}"
    return f"{prefix}{secrets.token_hex(16)}"
