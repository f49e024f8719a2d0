"""Messages between the frontend and the scheduler of one server. Grouped by receiver.

Knows nothing of sockets. Every message is a tagged struct; `codec.py` turns it into bytes and back.
`request_id` is unique in one server process.
"""

from __future__ import annotations

import msgspec

from common.failures import Failure
from common.request import (
    Bootstrap,
    CachedTokens,
    Claim,
    FinishReason,
    Origin,
    RequestTrace,
    SamplingParams,
    TokenLogprobs,
)
from common.weights import ServedWeights


class _Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A tagged struct. Its tag is the class name."""


# ---- to the scheduler ---------------------------------------------------------------------------


class Sibling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Another sample of the same prompt: a request of its own, sampled with another seed."""

    request_id: int
    seed: int
    origin: Origin = Origin()


class Submit(_Message, frozen=True):
    """A validated request. budget_s: seconds it may still take. bootstrap: None for a plain one.

    siblings: the other samples of the prompt, in the order in which the client numbers them. Each
        is answered, cancelled and ended alone. They share the prompt, its cache and its room.

    prefix_digests: of the prompt's beginnings (see prefix_digests.py); none if nothing of it is to
        be found in a cache, or kept there.

    output_ids: tokens of the answer that the client has already, from this server or another one;
        fewer than max_new_tokens, and of a request without siblings. It goes on behind them, as one
        whose pages others needed: nothing of them is told again, and its room is of no use to it.
    claim: what decides whose turn it is; the same for all samples.
    """

    request_id: int
    token_ids: list[int]
    sampling: SamplingParams
    budget_s: float
    bootstrap: Bootstrap | None = None
    origin: Origin = Origin()
    prefix_digests: bytes = b""
    siblings: list[Sibling] = []
    output_ids: list[int] = []
    claim: Claim = Claim()

    @property
    def samples(self) -> list[Sibling]:
        """All of them, the message's own first."""
        return [Sibling(self.request_id, self.sampling.seed, self.origin), *self.siblings]


class Cancel(_Message, frozen=True):
    """The client went away, aborted, or a stop string matched. Unknown ids are ignored.

    is_moved: another server goes on with the request, so what is computed of it is worth as much as
        an answer that has ended.
    """

    request_id: int
    reason: str = "aborted by the client"
    is_moved: bool = False


class Drain(_Message, frozen=True):
    """The server drains: take no new requests, finish the open ones."""


class FlushCache(_Message, frozen=True):
    call_id: int


class Pause(_Message, frozen=True):
    """Plan no more steps and begin no more requests, until `Continue`; answered once nothing is
    computed, unless call_id is 0. retracts: what decodes gives its pages back as well, and comes
    again as others that wait."""

    call_id: int
    retracts: bool = False


class Continue(_Message, frozen=True):
    """Go on after a `Pause`; harmless without one."""

    call_id: int


class UpdateWeights(_Message, frozen=True):
    """Have all workers load other weights, and another scheduler take them on with these.
    incarnation: of the scheduler that is asked; one that follows it leaves the message alone.

    A failure is answered with `CallDone`, and nothing has changed. Otherwise the next scheduler's
    `ServerInfo` names these weights.
    """

    call_id: int
    weights: ServedWeights
    incarnation: str


class GetState(_Message, frozen=True):
    """Asks for a `State`: gauges for /metrics and /server_info."""

    call_id: int


class WantedPeer(msgspec.Struct, frozen=True, omit_defaults=True):
    """An address "host:port" of a prefill server. is_dialled: until a server answers, and again
    whenever it is lost; otherwise a connection that stands goes on for as long as it lasts."""

    address: str
    is_dialled: bool = True


class SetPeers(_Message, frozen=True):
    """All prefill servers that are wanted. One that is not named any more is let go: nothing new is
    asked of it, and the connection ends once nothing is under way. Those that requests name come
    beside."""

    peers: list[WantedPeer]


# ---- to the frontend ----------------------------------------------------------------------------


class Tokens(_Message, frozen=True):
    """New output tokens of a request; the last one carries `finish` and `trace`.

    token_ids: only the new ones. logprobs: one entry per new token if asked for.
    prompt_logprobs: once, with the first token, if asked for; `encode_logprobs` of each chunk.
    offset: how many tokens of the output came before, so that a gap is seen.
    """

    request_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[bytes] = []
    cached: CachedTokens = CachedTokens()
    finish: FinishReason | None = None
    trace: RequestTrace | None = None
    offset: int = 0


class Failed(_Message, frozen=True):
    """The request ended in one typed error. status: the HTTP status it maps to. retry_after_s: as
    of `Failure`."""

    request_id: int
    status: int
    kind: str
    message: str
    trace: RequestTrace | None = None
    retry_after_s: float = 0.0

    @staticmethod
    def of(request_id: int, failure: Failure, trace: RequestTrace | None = None) -> Failed:
        return Failed(
            request_id,
            failure.status,
            failure.kind,
            failure.message,
            trace,
            failure.retry_after_s,
        )


class Outputs(_Message, frozen=True):
    """New output of all requests since the last such message: of one step, or of several steps if
    the frontend lags. Of one request, tokens come before a failure."""

    items: list[Tokens | Failed]


class Traced(_Message, frozen=True):
    """A request of a decode server, which this prefill server's frontend never saw, has ended."""

    trace: RequestTrace


class CallDone(_Message, frozen=True):
    """Answer to a command. message: why it was not done, or what else is to be said of it."""

    call_id: int
    is_done: bool
    message: str


class PeerState(_Message, frozen=True):
    """One peer as this server sees it. state: connecting, refused, connected, lost; leaving once it
    is not wanted any more.

    breaker: closed; open or half open after failures in a row.
    is_self_test_failing: the last self-test failed, and no transfer has completed since.
    rank_pairs: (prefill rank, decode rank) between which bytes may travel; none before layouts are
        known.
    name: for operators; unique among the peers of a server. http_address: of its page.
    version: of the protocol, as both speak it; 0 before it is known.
    """

    address: str
    incarnation: str
    state: str
    detail: str = ""
    transports: list[str] = []
    tp_size: int = 0
    pp_size: int = 0
    page_size: int = 0
    in_flight_count: int = 0
    transfer_mode: list[str] = []
    verify: str = ""
    breaker: str = ""
    breaker_open_count: int = 0
    is_self_test_failing: bool = False
    rank_pairs: list[tuple[int, int]] = []
    name: str = ""
    http_address: str = ""
    version: int = 0

    @property
    def label(self) -> str:
        return self.name or self.address or self.incarnation


class PageGroupState(_Message, frozen=True):
    """Pages of one page group. total excludes the scratch page; used + free + quarantined = total.

    is_window: a request gives pages back as it grows.
    page_tokens: tokens that a page covers; 0 where a request of any length has one page.
    page_nbytes: of all ranks together.
    cached: in the prefix cache and used by no request; part of free.
    """

    name: str
    is_window: bool
    page_items: int
    page_tokens: int
    page_nbytes: int
    total: int
    free: int
    used: int
    cached: int
    quarantined: int

    @property
    def token_nbytes(self) -> float:
        """Bytes of one token on all ranks together; 0 where a request has one page."""
        return self.page_nbytes / self.page_tokens if self.page_tokens else 0.0


class PrefixCacheState(_Message, frozen=True):
    """What a server keeps of prompts and answers for later ones.

    token_count: tokens in the tree, in use or not, each beginning counted once. block_tokens: of
        one block; 0 if nothing is kept. node_count: of the tree.
    checkpoint_count: states and open pages that a prompt can go on from; checkpoint_max: as many
        have room, 0 also where the cache needs none.
    digest_count: beginnings that peers are told of.
    reason: why nothing is kept, "" if it is.
    host_token_count: tokens in the tier in host memory; host_token_max: as many have room there.
    """

    token_count: int = 0
    block_tokens: int = 0
    node_count: int = 0
    checkpoint_count: int = 0
    checkpoint_max: int = 0
    digest_count: int = 0
    reason: str = ""
    host_token_count: int = 0
    host_token_max: int = 0


class State(_Message, frozen=True):
    """Answer to GetState. queues: queue name -> depth; counters: name -> value since start.

    trouble: why this server can't serve although its scheduler answers, "" if nothing is wrong.
    is_paused: no step is planned until somebody asks to continue.
    prefix_cache: None from a scheduler that says nothing of it.
    """

    call_id: int
    is_ready: bool
    queues: dict[str, int]
    counters: dict[str, float]
    page_groups: list[PageGroupState]
    peers: list[PeerState]
    step_count: int = 0
    workers: list[dict[str, str]] = []
    trouble: str = ""
    prefix_cache: PrefixCacheState | None = None
    is_paused: bool = False


class ServerInfo(_Message, frozen=True):
    """Sent once to the frontend when all workers are ready (is_ready may still wait for a peer).

    incarnation: of this process, random per start. pid: the scheduler's own. weights: that its
    workers compute with.
    """

    token_capacity: int
    request_token_max: int
    running_max: int
    vocab_size: int
    eos_token_ids: list[int]
    fingerprint: dict[str, str]
    workers: list[dict[str, str]]
    incarnation: str = ""
    pid: int = 0
    weights: ServedWeights = ServedWeights()


# Command: what a core is told; the rest is for the process around it.
Command = Submit | Cancel | Drain | FlushCache | Pause | Continue | GetState | SetPeers
FrontendToScheduler = Command | UpdateWeights
# Notice: a message of its own. ToldFrontend: an effect of a core; output is gathered in `Outputs`.
Notice = Traced | CallDone | State | ServerInfo
ToldFrontend = Tokens | Failed | Notice
SchedulerToFrontend = Outputs | Notice
