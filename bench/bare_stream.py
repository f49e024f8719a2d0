"""The least that FastAPI and uvicorn can do: the bytes of a captured answer, as it came.

    python -m bench.bare_stream PORT FILE_WITH_EVENTS FILE_WITH_REPLY

POST /stream writes one event after another, each by itself, and lets the other streams have their
turn in between, as a server must whose tokens come one by one. POST /whole answers at once, and
GET /health says that it listens.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

EVENT_END = b"\n\n"


def build(events: list[bytes], reply: bytes) -> FastAPI:
    app = FastAPI(openapi_url=None)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.post("/stream")
    async def stream(request: Request) -> Response:
        orjson.loads(await request.body())
        return StreamingResponse(one_by_one(events), media_type="text/event-stream")

    @app.post("/whole")
    async def whole(request: Request) -> Response:
        orjson.loads(await request.body())
        return Response(reply, media_type="application/json")

    return app


async def one_by_one(events: list[bytes]) -> AsyncIterator[bytes]:
    for event in events:
        yield event
        await asyncio.sleep(0)


def main(port: int, events: bytes, reply: bytes) -> None:
    split = [part + EVENT_END for part in events.split(EVENT_END)[:-1]]
    uvicorn.run(build(split, reply), port=port, loop="uvloop", access_log=False, log_config=None)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]).read_bytes(), Path(sys.argv[3]).read_bytes())
