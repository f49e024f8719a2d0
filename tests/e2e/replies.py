"""The parts of the servers' replies that the end-to-end tests read. Knows nothing of sockets."""

from __future__ import annotations

import httpx
import msgspec

# value, token id, text
Logprob = tuple[float | None, int, str | None]


class Finish(msgspec.Struct):
    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str = ""
    status_code: int | None = None
    err_type: str | None = None


class TransferTimes(msgspec.Struct):
    """The prefill server's part of a timeline; seconds."""

    queue_s: float
    prefill_s: float
    transfer_s: float
    nbytes: int
    run_count: int
    chunk_count: int


class Timeline(msgspec.Struct):
    peer: str
    status: str
    reserve_s: float
    transfer: TransferTimes
    first_token_s: float
    ttft_s: float


class Cached(msgspec.Struct, frozen=True):
    """Tokens of a prompt that each server had."""

    prefill: int = 0
    decode: int = 0


class Meta(msgspec.Struct):
    id: str
    finish_reason: Finish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_retractions: int
    weight_version: str = ""
    weight_versions: list[tuple[str, int]] = []
    cached_tokens_details: Cached = Cached()
    spec_verify_ct: int = 0
    spec_draft_token_num: int = 0
    spec_accept_token_num: int = 0
    spec_accept_rate: float = 0.0
    spec_accept_length: float = 0.0
    timeline: Timeline | None = None
    input_token_logprobs: list[Logprob] = []
    output_token_logprobs: list[Logprob] = []
    input_top_logprobs: list[list[Logprob] | None] = []
    output_top_logprobs: list[list[Logprob] | None] = []


class Reply(msgspec.Struct):
    """A reply of /generate, or one event of its stream."""

    text: str
    output_ids: list[int]
    meta_info: Meta
    index: int = 0

    @property
    def finish(self) -> Finish:
        assert self.meta_info.finish_reason is not None, "the reply has not ended"
        return self.meta_info.finish_reason

    @property
    def timeline(self) -> Timeline:
        assert self.meta_info.timeline is not None, "the reply has no timeline"
        return self.meta_info.timeline


class Message(msgspec.Struct, frozen=True):
    content: str | None = None


class CompletionLogprobs(msgspec.Struct):
    """OpenAI's parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]


class Choice(msgspec.Struct):
    """One of an OpenAI API, or what has grown of it."""

    index: int
    text: str = ""
    message: Message = Message()
    delta: Message = Message()
    logprobs: CompletionLogprobs | None = None

    @property
    def piece(self) -> str:
        return self.text + (self.message.content or "") + (self.delta.content or "")


class Completion(msgspec.Struct):
    """A reply of an OpenAI API, or one event of its stream."""

    choices: list[Choice]


def event_payloads(response: httpx.Response) -> list[bytes]:
    """What the events of a stream carry; the stream has its closing mark."""
    lines = [line for line in response.content.splitlines() if line]
    assert response.status_code == 200, response.text
    assert lines[-1] == b"data: [DONE]", lines[-1]
    return [line.removeprefix(b"data: ") for line in lines[:-1]]


def texts_of(path: str, payloads: list[bytes]) -> list[str]:
    """Every sample's text, in order: of one whole reply, or of the events of a stream."""
    texts: dict[int, str] = {}
    for payload in payloads:
        if path == "/generate":
            many = payload.startswith(b"[")
            found = msgspec.json.decode(payload, type=list[Reply] if many else Reply)
            for place, reply in enumerate(found if isinstance(found, list) else [found]):
                texts[place or reply.index] = reply.text
        else:
            for choice in msgspec.json.decode(payload, type=Completion).choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.piece
    return [texts[index] for index in sorted(texts)]


class ErrorMessage(msgspec.Struct):
    message: str
    type: str = ""
    code: str | int | None = None
    param: str | None = None


class ErrorReply(msgspec.Struct):
    error: ErrorMessage


class Peer(msgspec.Struct):
    address: str
    incarnation: str
    state: str
    detail: str
    transports: list[str]
    in_flight_count: int
    transfer_mode: list[str]
    name: str = ""
    version: int = 0


class PageGroup(msgspec.Struct):
    name: str
    token_nbytes: float
    total: int
    free: int
    used: int
    cached: int
    quarantined: int

    @property
    def is_all_free(self) -> bool:
        """Nobody has a page; cached ones count as free."""
        return self.free == self.total and not self.used and not self.quarantined


class Internal(msgspec.Struct):
    queues: dict[str, int]
    counters: dict[str, float]
    step_count: int


class Info(msgspec.Struct):
    """/server_info."""

    status: str
    is_state_fresh: bool
    peers: list[Peer]
    page_groups: list[PageGroup]
    internal_states: list[Internal]
    dtype: str
    max_request_token_count: int | None
    max_total_num_tokens: int
    incarnation: str = ""
    weight_version: str = ""

    @property
    def queues(self) -> dict[str, int]:
        return self.internal_states[0].queues

    @property
    def counters(self) -> dict[str, float]:
        return self.internal_states[0].counters

    @property
    def step_count(self) -> int:
        return self.internal_states[0].step_count

    @property
    def is_at_rest(self) -> bool:
        """No request in any queue, and every page free."""
        is_free = bool(self.page_groups) and all(g.is_all_free for g in self.page_groups)
        return self.is_state_fresh and is_free and not any(self.queues.values())


def accept_length(replies: list[Reply]) -> float:
    """Tokens of a verification, on average."""
    steps = sum(reply.meta_info.spec_verify_ct for reply in replies)
    accepted = sum(reply.meta_info.spec_accept_token_num for reply in replies)
    return 1.0 + accepted / steps
