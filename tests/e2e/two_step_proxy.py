"""A proxy in the manner of vLLM's example and of llm-d's sidecar: the prefill server first, for one
token; then the decode server, with what the first has said. It reads nothing of that itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

import httpx
import msgspec

from tests.e2e.fleet import Body, Node

ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Told(msgspec.Struct):
    """What of the prefill server's reply is passed on; numbers may become floats on the way."""

    kv_transfer_params: dict[str, object]


@dataclass
class TwoStepProxy:
    """is_thorough: also take away what vLLM's own proxy does, and llm-d's sidecar leaves alone."""

    prefill: Node
    decode: Node
    client: httpx.Client
    is_thorough: bool = True

    def first_step(self, path: str, body: Body, name: str = "") -> dict[str, object]:
        """Returns the parameters for the second step. Raises: httpx.HTTPStatusError."""
        first = body | {"stream": False, "max_tokens": 1, "kv_transfer_params": ASKED}
        if "max_completion_tokens" in body or not self.is_thorough:
            first["max_completion_tokens"] = 1
        first.pop("stream_options", None)
        if self.is_thorough:
            first.pop("min_tokens", None)
        headers = {"X-Request-Id": name or str(uuid4())}
        response = self.client.post(self.prefill.url + path, json=first, headers=headers)
        response.raise_for_status()
        return msgspec.json.decode(response.content, type=Told).kv_transfer_params

    def second_step(self, path: str, body: Body, params: object) -> httpx.Response:
        """The client's own body. A name that it brought is there twice, as llm-d adds its own."""
        headers = [("X-Request-Id", "client-1"), ("X-Request-Id", str(uuid4()))]
        second = body | {"kv_transfer_params": params}
        return self.client.post(self.decode.url + path, json=second, headers=headers)

    def post(self, path: str, body: Body) -> httpx.Response:
        return self.second_step(path, body, self.first_step(path, body))

    @contextmanager
    def stream(self, path: str, body: Body) -> Iterator[httpx.Response]:
        second = body | {"kv_transfer_params": self.first_step(path, body), "stream": True}
        with self.client.stream("POST", self.decode.url + path, json=second) as response:
            yield response
