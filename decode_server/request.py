"""One request on the decode server, and one transfer on its behalf.

A transfer (`Transfer`) can outlive its request: the client is answered at once, but the pages stay
with the transfer until its writer is proved quiet. The scheduler is the only writer of both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config import TransferMode, Verify
from common.request import Bootstrap, Origin, RequestTrace, SamplingParams, TransferTrace
from common.scheduling.sequence import PageSpan, Sequence
from common.scheduling.transitions import DecodeEvent, DecodeState, next_decode_state


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """token_ids: the prompt and everything generated so far. link: where its cache comes from.

    failure_count: transfers that brought nothing since it last ran; tried_links: the prefill
    servers that failed them.
    is_computed_here: no prefill server is looked for any more.
    tested_link: of the prefill server that this is a self-test of; no client waits for it then.
    """

    request_id: int
    token_ids: list[int]
    prompt_count: int
    sampling: SamplingParams
    bootstrap: Bootstrap | None
    arrived_at: float
    deadline: float
    state: DecodeState = DecodeState.WAITING
    link: str = ""
    transfer: Transfer | None = None
    sequence: Sequence | None = None
    failure_count: int = 0
    retraction_count: int = 0
    is_computed_here: bool = False
    tested_link: str = ""
    tried_links: set[str] = field(default_factory=set)
    prompt_logprobs: list[bytes] = field(default_factory=list)
    waiting_since: float = 0.0
    requested_at: float = 0.0
    first_token_at: float = 0.0
    transfer_trace: TransferTrace = field(default_factory=TransferTrace)
    peer: str = ""
    origin: Origin = field(default_factory=Origin)

    def advance(self, event: DecodeEvent) -> None:
        self.state = next_decode_state(self.state, event)

    @property
    def output_count(self) -> int:
        return len(self.token_ids) - self.prompt_count

    @property
    def is_held(self) -> bool:
        """Whether a prefill server says that it has computed the prompt and holds its cache. Any
        other can compute it again."""
        return self.bootstrap is not None and bool(self.bootstrap.engine) and not self.output_count

    @property
    def bootstrap_link(self) -> str | None:
        """The one prefill server that can serve this request: the router's choice, for as long as
        that server alone knows the prompt's other half. None: any can."""
        if self.tested_link:
            return self.tested_link
        if self.bootstrap is None or self.output_count > 0:
            return None
        return f"{self.bootstrap.host}:{self.bootstrap.port}"

    def note_failed(self) -> None:
        """A transfer brought nothing."""
        self.failure_count += 1
        self.tried_links.add(self.link)

    def note_computed_here(self, sequence: Sequence, now: float) -> None:
        """This server computed the prompt itself: there was no transfer to account for."""
        self.transfer_trace = TransferTrace(
            prefill_s=now - self.requested_at, cached_token_count=sequence.cached_count
        )

    def trace(self, now: float, *, status: str = "ok", message: str = "") -> RequestTrace:
        """Stage times that add up to ttft_s; first_token_s is what nothing else explains."""
        requested_at = self.requested_at or now
        first_token_at = self.first_token_at or now
        explained = (
            self.transfer_trace.queue_s
            + self.transfer_trace.prefill_s
            + self.transfer_trace.transfer_s
        )
        return RequestTrace(
            request_id=self.request_id,
            peer=self.peer,
            status=status,
            message=message,
            arrived_s=self.arrived_at,
            prompt_token_count=self.prompt_count,
            output_token_count=self.output_count,
            cached_token_count=self.transfer_trace.cached_token_count,
            retraction_count=self.retraction_count,
            reserve_s=requested_at - self.arrived_at,
            transfer=self.transfer_trace,
            first_token_s=max(0.0, first_token_at - requested_at - explained),
            ttft_s=first_token_at - self.arrived_at,
            decode_s=now - first_token_at,
            e2e_s=now - self.arrived_at,
            origin=self.origin,
        )


@dataclass(slots=True, eq=False)
class Transfer:
    """One attempt to get a cache. request is None once the client has been answered without it.

    spans: the reserved pages, owned by the transfer until it settles. mode: how they may be
        written; unless directly, our workers must forget the transfer before anyone else has them.
    verify: how much is compared with what was sent; source_layout: of the peer, msgpack.
    credit: the attachment that it uses a credit of until its writer is quiet; 0 if it uses none.
    is_quiet: the peer has said its last word, and the pages are compared with it.
    """

    transfer_id: int
    link: str
    peer: str
    token_count: int
    spans: list[PageSpan]
    writers: list[int]
    request: DecodeRequest | None
    mode: TransferMode = TransferMode.DIRECT
    verify: Verify = Verify.OFF
    source_layout: bytes = b""
    credit: int = 0
    is_quiet: bool = False
