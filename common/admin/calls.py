"""One question to one server, bounded in time and size, with the right key or none.

Knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from common.admin.answers import ServerAnswer, decode
from common.errors import BatonError
from common.frontend.http.client import HttpFailed, Request, ServerUrl, ask, error_message

# A server with 192 peers of many ranks says about 1 MB.
ANSWER_NBYTES_MAX = 4 << 20
REASON_LENGTH_MAX = 1000


class Unreachable(BatonError):
    """A server did not answer, or not in HTTP."""


class Refused(BatonError):
    """A server answered that it does not do what it was asked."""


@dataclass(frozen=True, slots=True)
class Caller:
    """named: the servers that the administrator named. key, admin_key: "" for none. timeout_s: for
    a whole answer.

    The admin key is shown to named servers only. Other servers are found because a peer says that
    they are there, which a wrong peer could say of anything: they see the API key at most, and not
    even that over plain HTTP if all named servers are asked by TLS.
    """

    named: Sequence[ServerUrl]
    key: str
    admin_key: str
    timeout_s: float

    async def info(self, url: ServerUrl) -> ServerAnswer:
        """Raises: Unreachable, Refused, NotUnderstood."""
        return decode(await self.get(url, "/server_info"), ServerAnswer)

    async def get(self, url: ServerUrl, path: str) -> bytes:
        """Raises: Unreachable, Refused."""
        return await self._call(url, Request("GET", path, key=self.reading_key(url)))

    async def change(self, method: str, url: ServerUrl, path: str, body: object = None) -> bytes:
        """body: sent as JSON; None for none. Raises: Unreachable, Refused."""
        assert url in self.named, "nothing is changed that the administrator did not name"
        sent = b"" if body is None else msgspec.json.encode(body)
        return await self._call(url, Request(method, path, sent, self.admin_key or self.key))

    def reading_key(self, url: ServerUrl) -> str:
        if url in self.named:
            return self.key or self.admin_key
        is_exposed = not url.is_tls and all(one.is_tls for one in self.named)
        return "" if is_exposed else self.key

    async def _call(self, url: ServerUrl, request: Request) -> bytes:
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                ask(url, request, self.timeout_s) as answer,
            ):
                document = await answer.document(ANSWER_NBYTES_MAX)
                status = answer.status
        except TimeoutError as exc:
            raise Unreachable(f"no answer within {self.timeout_s:g} s") from exc
        except HttpFailed as exc:
            raise Unreachable(str(exc).removeprefix(f"{url} ")) from exc
        if status != 200:
            raise Refused(_reason(status, document, request))
        return document


def _reason(status: int, document: bytes, request: Request) -> str:
    """Never with a key in it, also if the server repeats the one that it was shown."""
    if status == 401:
        return "does not take the key that was shown" if request.key else "wants a key"
    said = error_message(document)
    if request.key:
        said = said.replace(request.key, "KEY")
    path = request.path.partition("?")[0]
    return said[:REASON_LENGTH_MAX] or f"answered {status} to {request.method} {path}"


def harmless(text: str) -> str:
    """Without what moves a terminal's cursor, or makes text look like another: it may come from
    anything that speaks HTTP."""
    return "".join(char if char.isprintable() else "?" for char in text)


def to_json(document: object, *, is_pretty: bool) -> str:
    """Only ASCII, so that a terminal shows it as it is."""
    return json.dumps(document, indent=2 if is_pretty else None)
