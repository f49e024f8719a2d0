"""Other servers that answer what nobody can read: it costs them the request, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from common.protocol.frontend import Tokens
from common.request import SamplingParams
from tests.frontend.frontend_rig import Rig, run_with_rig
from tests.frontend.generate_rig import counted_up

PROMPT = [5, 6]
COUNT = 3
NESTED = b'{"error": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
pytestmark = pytest.mark.slow


@asynccontextmanager
async def server_of(answers: dict[str, tuple[int, bytes]]) -> AsyncIterator[str]:
    """A server that answers each path with a status and a body. Its URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status, body = answers[head.split()[1].decode()]
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"


def ready_info(rig: Rig) -> bytes:
    own = rig.context.scheduler.server_info
    assert own is not None
    info = {"role": "decode", "status": "ready", "fingerprint": own.fingerprint}
    return msgspec.json.encode({**info, "incarnation": "other", "max_request_token_count": 1000})


@pytest.mark.parametrize(
    ("info", "resumed"),
    [
        (NESTED, (200, b"")),
        (b"", (503, NESTED)),
        (b"", (400, b'{"error": 1}')),
        (b"", (503, b"\xff")),
        (b"", (200, b"data: " + NESTED + b"\n\n")),
    ],
    ids=["state", "refusal", "refusal-of-another-shape", "refusal-in-no-text", "stream"],
)
def test_what_can_not_be_read_sends_the_request_to_the_next_server(
    tmp_path: Path, info: bytes, resumed: tuple[int, bytes]
) -> None:
    async def story(rig: Rig) -> None:
        answers = {"/resume": resumed, "/server_info": (200, info or ready_info(rig))}
        async with server_of(answers) as url:
            fleet, relays = rig.context.fleet, rig.context.relays
            fleet.targets = (url,)
            rig.scheduler.holds = True
            sampling = SamplingParams(max_new_tokens=COUNT, seed=1)
            handle = rig.context.submit(PROMPT, sampling, rid="r")
            await rig.until(lambda s: bool(s.held))
            rig.scheduler.holds = False
            relays.may_go_on_here = True
            relays.move(handle)
            messages = [message async for message in handle]
            assert all(isinstance(message, Tokens) for message in messages), messages
            assert handle.output_ids.tolist() == counted_up(PROMPT, COUNT)
            assert len(fleet.servers) == (0 if info else 1)

    run_with_rig(tmp_path, story)
