"""A scheduler with behaviour but no model, behind a real local channel, for tests of the frontend.

It continues every prompt by counting up from its last token, one message per token, so a test knows
the right answer. What it is asked it keeps; what it answers with can be held back or replaced.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

import msgspec

from common.channel.local import LocalServer
from common.channel.poller import Poller
from common.channel.sockets import SendResult
from common.protocol.codec import decode_frontend_to_scheduler, encode, encode_logprobs
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
    PageGroupState,
    Pause,
    PeerState,
    PrefixCacheState,
    ServerInfo,
    SetPeers,
    State,
    Submit,
    Tokens,
    ToldFrontend,
    UpdateWeights,
)
from common.request import (
    FinishKind,
    FinishReason,
    RequestTrace,
    TokenLogprobs,
    TransferTrace,
)

POLL_S = 0.005  # how soon a message that a test hands in is sent

INFO = ServerInfo(
    token_capacity=512,
    request_token_max=512,
    running_max=96,
    vocab_size=320,
    eos_token_ids=[0],
    fingerprint={"dtype": "float32"},
    workers=[{"rank": "0", "ucx_version": "1.22.0", "ucx_origin": "wheel"}],
)
PAGES = PageGroupState(
    name="full",
    is_window=False,
    page_items=16,
    page_tokens=16,
    page_nbytes=4096,
    total=256,
    free=200,
    used=50,
    cached=20,
    quarantined=6,
)
PREFIX_CACHE = PrefixCacheState(
    token_count=960, block_tokens=16, node_count=7, checkpoint_count=2, checkpoint_max=8
)
PEER = PeerState(
    address="127.0.0.1:8998",
    incarnation="abc",
    state="connected",
    transports=["sysv", "posix"],
    tp_size=1,
    pp_size=1,
    page_size=16,
)

Answer = Callable[[Submit], list[ToldFrontend]]


def samples_in(message: FrontendToScheduler) -> list[FrontendToScheduler]:
    """A message, or the requests that stand in it; each names the others as its siblings."""
    if not isinstance(message, Submit) or not message.siblings:
        return [message]
    return [
        msgspec.structs.replace(
            message,
            request_id=sample.request_id,
            sampling=msgspec.structs.replace(message.sampling, seed=sample.seed),
            origin=sample.origin,
            siblings=[other for other in message.samples if other is not sample],
        )
        for sample in message.samples
    ]


def count_up(submit: Submit, vocab_size: int = INFO.vocab_size) -> list[ToldFrontend]:
    """The whole continuation: last token + 1, + 2, ...; the logprob of token t is -t/8."""
    count = submit.sampling.max_new_tokens - len(submit.output_ids)
    last = [*submit.token_ids, *submit.output_ids][-1]
    outputs = [1 + (last + i) % (vocab_size - 1) for i in range(count)]
    wants = submit.sampling.return_logprob
    start = submit.sampling.logprob_start_len
    prompt = list(enumerate(submit.token_ids))[start:] if wants and start >= 0 else []
    messages: list[ToldFrontend] = []
    for i, token in enumerate(outputs):
        is_last = i == count - 1
        messages.append(
            Tokens(
                request_id=submit.request_id,
                token_ids=[token],
                logprobs=[logprobs_of(token, submit)] if wants else [],
                prompt_logprobs=[
                    encode_logprobs([logprobs_of(t, submit, is_first=p == 0)]) for p, t in prompt
                ]
                if i == 0
                else [],
                finish=FinishReason(FinishKind.LENGTH) if is_last else None,
                trace=trace_of(submit, count) if is_last else None,
            )
        )
    return messages


def logprobs_of(token: int, submit: Submit, *, is_first: bool = False) -> TokenLogprobs:
    if is_first:
        return TokenLogprobs(token, None)
    top = [(t, -t / 8) for t in range(submit.sampling.top_logprobs_num)]
    asked = [(t, -t / 8) for t in submit.sampling.token_ids_logprob]
    return TokenLogprobs(token, -token / 8, top, asked)


def trace_of(submit: Submit, output_count: int, status: str = "ok") -> RequestTrace:
    """Stages of 1, 2, 4, 8 and 16 ms: 31 ms to the first token."""
    return RequestTrace(
        request_id=submit.request_id,
        peer="127.0.0.1:8998",
        status=status,
        prompt_token_count=len(submit.token_ids),
        output_token_count=output_count,
        reserve_s=0.001,
        transfer=TransferTrace(
            queue_s=0.002,
            prefill_s=0.004,
            transfer_s=0.008,
            wire_s=0.010,
            nbytes=10_000_000,
            exposed_nbytes=500_000,
            run_count=3,
        ),
        first_token_s=0.016,
        ttft_s=0.031,
        decode_s=0.01 * max(0, output_count - 1),
        e2e_s=0.031 + 0.01 * max(0, output_count - 1),
    )


class ScriptedScheduler:
    """Runs in a thread of its own between `with` and its end. Public methods are for the test.

    seen: every message of the frontend, in order, a Submit once for each sample. held: submits that
    wait for `release`.
    is_stalled: no step is taken between two looks, although requests are said to run.
    """

    def __init__(self, path: Path, answer: Answer = count_up, info: ServerInfo = INFO) -> None:
        self.seen: list[FrontendToScheduler] = []
        self.held: dict[int, Submit] = {}
        self.answer = answer
        self.info = info
        self.holds = False
        self.is_ready = True
        self.is_silent = False
        self.queues = {"running": 1, "waiting": 2, "transfer": 3, "prealloc": 4}
        self.counters = {"retracted": 5.0, "transfer_failed": 6.0, "stale_messages": 7.0}
        self.peers = [PEER]
        self.page_groups = [PAGES]
        self.prefix_cache: PrefixCacheState | None = PREFIX_CACHE
        self.step_count = 0
        self.is_stalled = False
        self.flush_answer = (True, "the cache is empty")
        self.is_paused = False
        self.update_problem = ""
        self._server = LocalServer(str(path))
        self._orders: SimpleQueue[ToldFrontend | bytes] = SimpleQueue()
        self._told_counts: Counter[int] = Counter()  # tokens of each request
        self._changed = threading.Condition()
        self._is_ended = False
        self._is_known = False
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
        self._server.close()

    def send(self, message: ToldFrontend) -> None:
        """Say something unasked."""
        self._orders.put(message)

    def send_raw(self, payload: bytes) -> None:
        """Say something that need not be a message."""
        self._orders.put(payload)

    def release(self, request_id: int | None = None) -> None:
        """Answer a held submit, or all of them."""
        with self._changed:
            for held in [request_id] if request_id is not None else list(self.held):
                for message in self.answer(self.held.pop(held)):
                    self.send(message)

    def wait_for(self, found: Callable[[Self], bool], timeout_s: float = 20.0) -> None:
        """Block until `found` holds. Never call it on the frontend's own loop."""
        with self._changed:
            if not self._changed.wait_for(lambda: found(self), timeout_s):
                raise TimeoutError(f"not within {timeout_s} s; seen: {self.seen}")

    @property
    def submits(self) -> list[Submit]:
        return [message for message in self.seen if isinstance(message, Submit)]

    @property
    def wanted(self) -> dict[str, bool]:
        """What the frontend wants by its last word: address -> whether it is dialled."""
        told = [message for message in self.seen if isinstance(message, SetPeers)]
        return {peer.address: peer.is_dialled for peer in told[-1].peers} if told else {}

    @property
    def cancels(self) -> list[Cancel]:
        return [message for message in self.seen if isinstance(message, Cancel)]

    def _run(self) -> None:
        poller = Poller()
        poller.register(self._server)
        while not self._is_ended:
            poller.poll(POLL_S)
            for _, payload in self._server.receive():
                for message in samples_in(decode_frontend_to_scheduler(payload)):
                    self._take(message)
            while True:
                try:
                    order = self._orders.get_nowait()
                except Empty:
                    break
                if isinstance(order, bytes):
                    self._say(order)
                else:
                    self._tell(order)

    def _take(self, message: FrontendToScheduler) -> None:
        with self._changed:
            self.seen.append(message)
            if isinstance(message, Submit):
                self._told_counts[message.request_id] = len(message.output_ids)
            answers = [] if self.is_silent else self._react(message)
            self._changed.notify_all()
        for answer in answers:
            self._tell(answer)

    def _tell(self, message: ToldFrontend) -> None:
        """Every output in a message of its own, and with the offset that it has so far."""
        if isinstance(message, Tokens):
            offset = self._told_counts[message.request_id]
            self._told_counts[message.request_id] += len(message.token_ids)
            message = msgspec.structs.replace(message, offset=offset)
        is_output = isinstance(message, Tokens | Failed)
        self._say(encode(Outputs([message]) if is_output else message))

    def _say(self, payload: bytes) -> None:
        assert self._server.send("frontend", payload) is SendResult.SENT

    def _react(self, message: FrontendToScheduler) -> list[ToldFrontend]:
        if not self._is_known:
            self._is_known = True
            self._tell(self.info)
        match message:
            case Submit() if self.holds:
                self.held[message.request_id] = message
                return []
            case Submit():
                return self.answer(message)
            case Cancel(request_id, reason):
                submit = self.held.pop(request_id, None)
                if submit is None:
                    return []
                trace = trace_of(submit, 0, status="aborted")
                return [Failed(request_id, 499, "aborted", reason, trace)]
            case Drain() | SetPeers():
                return []
            case FlushCache(call_id):
                return [CallDone(call_id, *self.flush_answer)]
            case Pause(call_id) | Continue(call_id):
                self.is_paused = isinstance(message, Pause)
                return [CallDone(call_id, True, "")]
            case UpdateWeights(call_id) if self.update_problem:
                return [CallDone(call_id, False, self.update_problem)]
            case UpdateWeights(_, weights):
                self._is_known = False
                self.info = msgspec.structs.replace(
                    self.info, incarnation=weights.load_id, weights=weights
                )
                self._tell(self.info)
                return []
            case GetState(call_id):
                return [self._state(call_id)]

    def _state(self, call_id: int) -> State:
        self.step_count += not self.is_stalled
        return State(
            call_id=call_id,
            is_ready=self.is_ready,
            queues=dict(self.queues),
            counters=dict(self.counters),
            page_groups=self.page_groups,
            peers=list(self.peers),
            step_count=self.step_count,
            prefix_cache=self.prefix_cache,
            is_paused=self.is_paused,
        )
