"""A scheduler that has no model and never waits, so that only the frontend costs time.

    python -m bench.instant_engine SOCKET TOKEN_ID,TOKEN_ID,...

It speaks the real protocol over the real local channel, in a process of its own. Output is made in
steps, one token for each running request, as an engine makes it. The next step begins once the
clients, in a process of this server, have reported every token of the step before. So each token
is an event of its own, and no measured output is joined. A request of
a single token is answered at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from common.channel.local import LocalServer
from common.channel.poller import Poller
from common.channel.sockets import SendResult
from common.protocol.codec import decode_frontend_to_scheduler, encode
from common.protocol.frontend import (
    CallDone,
    Cancel,
    Continue,
    Drain,
    Failed,
    FlushCache,
    FrontendToScheduler,
    GetState,
    Outputs,
    Pause,
    SchedulerToFrontend,
    ServerInfo,
    SetPeers,
    State,
    Submit,
    Tokens,
    UpdateWeights,
)
from common.request import FinishKind, FinishReason, RequestTrace

FRONTEND = "frontend"
CLIENTS = "clients"
COUNT_NBYTES = 8
INFO = ServerInfo(
    token_capacity=1 << 24,
    request_token_max=1 << 20,
    running_max=1 << 16,
    vocab_size=1 << 20,
    eos_token_ids=[],
    fingerprint={},
    workers=[],
    pid=os.getpid(),
)


@dataclass(slots=True)
class Running:
    """One request. token_count: of its output so far."""

    submit: Submit
    token_count: int = 0


class InstantEngine:
    """Messages in, messages out. token_ids: what every output consists of, over and over."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._running: dict[int, Running] = {}
        self._unread_count = 0  # streamed tokens that no client has reported

    def handle(self, message: FrontendToScheduler) -> list[SchedulerToFrontend]:
        match message:
            case Submit(request_id):
                one = self._running[request_id] = Running(message)
                is_short = message.sampling.max_new_tokens == 1
                return [Outputs([self._advance(one)])] if is_short else []
            case Cancel(request_id, reason):
                if self._running.pop(request_id, None) is None:
                    return []
                return [Outputs([Failed(request_id, 499, "aborted", reason)])]
            case Drain() | SetPeers():
                return []
            case FlushCache(call_id) | Pause(call_id) | Continue(call_id):
                return [CallDone(call_id, True, "")]
            case UpdateWeights(call_id):
                return [CallDone(call_id, False, "this engine has no weights")]
            case GetState(call_id):
                return [State(call_id, True, {}, {}, [], [])]

    def read(self, token_count: int) -> None:
        """Clients have read so many more tokens."""
        self._unread_count -= token_count
        assert self._unread_count >= 0, "a token was read that was never sent"

    def step(self) -> Outputs | None:
        """One token for each running request, or nothing while the last ones are under way."""
        if self._unread_count or not self._running:
            return None
        self._unread_count = len(self._running)
        return Outputs([self._advance(one) for one in list(self._running.values())])

    def _advance(self, one: Running) -> Tokens:
        submit, offset = one.submit, one.token_count
        token_id = self._token_ids[offset % len(self._token_ids)]
        one.token_count += 1
        if one.token_count < submit.sampling.max_new_tokens:
            return Tokens(submit.request_id, [token_id], offset=offset)
        del self._running[submit.request_id]
        trace = RequestTrace(
            request_id=submit.request_id,
            prompt_token_count=len(submit.token_ids),
            output_token_count=one.token_count,
            origin=submit.origin,
        )
        finish = FinishReason(FinishKind.LENGTH)
        return Tokens(submit.request_id, [token_id], finish=finish, trace=trace, offset=offset)


def main(path: str, token_ids: Sequence[int]) -> None:
    """Serves until it is killed."""
    server = LocalServer(path)
    engine = InstantEngine(token_ids)
    poller = Poller()
    poller.register(server)
    is_known = False

    def say(message: SchedulerToFrontend) -> None:
        assert server.send(FRONTEND, encode(message)) is SendResult.SENT

    while True:
        poller.poll(None)
        for name, payload in server.receive():
            if name == CLIENTS:
                engine.read(int.from_bytes(payload, "little"))
                continue
            if not is_known:
                is_known = True
                say(INFO)
            for answer in engine.handle(decode_frontend_to_scheduler(payload)):
                say(answer)
        outputs = engine.step()
        if outputs is not None:
            say(outputs)


if __name__ == "__main__":
    main(sys.argv[1], [int(part) for part in sys.argv[2].split(",")])
