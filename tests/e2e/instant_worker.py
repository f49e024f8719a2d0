"""A worker without a model, in a thread of the test: what is drawn is known, and when is chosen.

It speaks the real protocol to a real scheduler over the real local channel. The token after token t
of a request is t + 1, around a small vocabulary.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from types import TracebackType
from typing import Self

from common.channel.local import LocalClient
from common.channel.poller import Poller
from common.channel.sockets import SendResult
from common.config import ServerConfig
from common.protocol.codec import decode_scheduler_to_worker, encode, encode_layout
from common.protocol.worker import Begin, Shutdown, Step, StepDone, WorkerReady
from tests.protocol.layouts import gqa

FIRST_TOKEN, VOCAB_SIZE = 5, 256
PAGE_COUNT = 1 << 16
CONTEXT_LENGTH = 1 << 16
POLL_S = 0.005


def next_token(token_id: int) -> int:
    return FIRST_TOKEN + (token_id - FIRST_TOKEN + 1) % (VOCAB_SIZE - FIRST_TOKEN)


class InstantWorker:
    """Answers steps between `with` and its end, as fast as they come; once it knows `request_count`
    requests it waits for `is_open`.
    """

    def __init__(self, config: ServerConfig, request_count: int) -> None:
        self.is_open = threading.Event()
        self._request_count = request_count
        self._client = LocalClient(config.scheduler_ipc_path, "worker-0")
        self._latest: dict[int, int] = {}
        self._drawn_counts: Counter[int] = Counter()
        self._held: list[Step] = []
        self._changed = threading.Condition()
        self._is_ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_ended = True
        self._thread.join()
        self._client.close()

    def wait_drawn(self, token_count: int, timeout_s: float = 120.0) -> None:
        """Block until so many tokens have been drawn for every request."""

        def is_drawn() -> bool:
            counts = self._drawn_counts.values()
            return len(counts) == self._request_count and min(counts) >= token_count

        with self._changed:
            if not self._changed.wait_for(is_drawn, timeout_s):
                raise TimeoutError(f"not within {timeout_s} s: {self._drawn_counts}")

    def _ready(self, session: str) -> WorkerReady:
        return WorkerReady(
            rank=0,
            page_counts=[PAGE_COUNT],
            layout=encode_layout(gqa()),
            fingerprint={},
            vocab_size=VOCAB_SIZE,
            context_length=CONTEXT_LENGTH,
            eos_token_ids=[],
            describe={},
            pid=os.getpid(),
            session=session,
        )

    def _run(self) -> None:
        self._send(self._ready(""))
        poller = Poller()
        poller.register(self._client)
        while not self._is_ended:
            poller.poll(POLL_S)
            for payload in self._client.receive():
                message = decode_scheduler_to_worker(payload)
                if isinstance(message, Step):
                    self._held.append(message)
                elif isinstance(message, Begin):
                    self._send(self._ready(message.session))
                elif isinstance(message, Shutdown):
                    return
            while self._held and (self.is_open.is_set() or not self._is_full):
                self._send(self._compute(self._held.pop(0)))

    @property
    def _is_full(self) -> bool:
        return len(self._drawn_counts) == self._request_count

    def _compute(self, step: Step) -> StepDone:
        for request_id in step.retired:
            self._latest.pop(request_id, None)
        for sequence in step.new:
            self._latest[sequence.request_id] = sequence.token_ids[-1]
        drawn = [chunk.request_id for chunk in step.chunks if chunk.is_last] + step.decode
        for request_id in drawn:
            self._latest[request_id] = next_token(self._latest[request_id])
        with self._changed:
            self._drawn_counts.update(drawn)
            self._changed.notify_all()
        return StepDone(step.step_id, drawn, [self._latest[request_id] for request_id in drawn])

    def _send(self, message: WorkerReady | StepDone) -> None:
        assert self._client.send(encode(message)) is SendResult.SENT
