"""What a request asks for and what is told of it afterwards. Plain values that cross processes.

Knows nothing of HTTP bodies, pages or peers. Stop *strings* never come here: the frontend, which
owns the tokenizer, matches them and cancels the request.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class GrammarKind(StrEnum):
    """How a grammar is written. lark: Lark's syntax, as llguidance reads it."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class Grammar(msgspec.Struct, frozen=True):
    """What the text of an output must be, from its first token to its end."""

    kind: GrammarKind
    text: str


CHUNK_MARK_COUNT_MAX = 64  # of one request in a timeline; more would not be told apart


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens of one request are drawn. Validated by the frontend; see SGLang's sampling_params.

    temperature: 0 means greedy. top_k: -1 means all. min_p: relative to the largest probability.
    seed: always set; the noise of the token at position p depends on (seed, p) alone, so the output
        does not depend on what else is in the batch, nor on which server draws it.
    repetition_penalty counts prompt and output tokens; presence and frequency count output only.
    max_new_tokens, min_new_tokens: counted from the end of the prompt.
    top_logprobs_num, token_ids_logprob: what is reported per token if return_logprob.
    logprob_start_len: index of the first prompt token whose log-probability is wanted; -1 for none.
    allowed_token_ids: no other token is drawn; () for all. bad_words: sequences of tokens; the last
        one of each is not drawn where the output ends with the others.
    grammar: what the output must follow. Which tokens it allows depends on the output so far alone,
        so whichever server goes on with a request finds the place again.
    """

    max_new_tokens: int
    seed: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    logprob_start_len: int = -1
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    def forbids_first(self, token_id: int) -> bool:
        """Whether this token may not begin an output: a peer that does not know of these rules may
        have drawn it all the same."""
        is_allowed = not self.allowed_token_ids or token_id in self.allowed_token_ids
        return not is_allowed or (token_id,) in self.bad_words


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: of the token itself, the top-k, and the asked-for ids.

    logprob is None for the first token of a prompt, which nothing predicts. rank: of the token
    among all, 1 for the likeliest; 0 where it is not told, as of outputs.
    """

    token_id: int
    logprob: float | None
    top: list[tuple[int, float]] = []
    asked: list[tuple[int, float]] = []
    rank: int = 0


# What one reported position takes in a message at most, with the headers of a chunk that has no
# other, and each likely or asked-for token there.
POSITION_NBYTES = 36
ENTRY_NBYTES = 15


def logprobs_nbytes(sampling: SamplingParams, position_count: int) -> int:
    """What the log-probabilities of so many positions take in a message at most; 0 if none are
    asked for."""
    if not sampling.return_logprob:
        return 0
    entry_count = sampling.top_logprobs_num + len(sampling.token_ids_logprob)
    return position_count * (POSITION_NBYTES + ENTRY_NBYTES * entry_count)


class FinishKind(StrEnum):
    """Why a request ended well; spelled as SGLang's finish_reason.type."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class FinishReason(msgspec.Struct, frozen=True):
    """matched: the token id that stopped it. message: why it was aborted."""

    kind: FinishKind
    matched: int | None = None
    message: str = ""


class Bootstrap(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where both servers are to meet. room: 0 .. 2**63 - 1.

    engine: "" if a router has chosen the room for both. Else the incarnation of the prefill server
        that computes the prompt first, holds its cache under the room and says so to its client; a
        decode server that is told of it may not need to dial `host`, which may be "".
    """

    host: str
    port: int
    room: int
    engine: str = ""


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who asked, for those who look later. Nothing is decided by it.

    rid: the client's name for the request. trace_parent: the W3C traceparent of the span that
    whatever is done for it belongs to; "" without tracing.
    """

    rid: str = ""
    trace_parent: str = ""


class Claim(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whose turn it is among requests that wait; see `common/scheduling/waiting_queue.py`.

    priority: larger is more urgent, whichever way round the client's server reads it.
    client: a digest of the API key that was shown; "" for all that showed none.
    """

    priority: int = 0
    client: str = ""


NO_CLAIM = Claim()


class CachedTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens of a prompt whose cache was there before the request came.

    prefill: on the prefill server, which did not compute them. decode: on the decode server, to
    which they were not sent.
    """

    prefill: int = 0
    decode: int = 0

    @property
    def count(self) -> int:
        """Those that at least one of the servers had: both count from the prompt's beginning."""
        return max(self.prefill, self.decode)


class TransferTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """The prefill server's account of one transfer; durations in seconds on its own clock.

    queue_s: reservation arrived to first chunk scheduled. prefill_s: to last chunk computed and
    first token sampled. transfer_s: from there to the last flush (what was not hidden behind
    compute). wire_s: sum over batches of the time from submit to flush. exposed_nbytes: bytes that
    were still to move when the last layer of the last chunk was computed.
    chunk_ends_s: when each chunk was computed, counted from the first one's start; of a prompt with
    more than CHUNK_MARK_COUNT_MAX chunks, the first ones.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    wire_s: float = 0.0
    nbytes: int = 0
    exposed_nbytes: int = 0
    run_count: int = 0
    chunk_count: int = 0
    cached_token_count: int = 0
    chunk_ends_s: list[float] = []


class Speculated(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of tokens that were proposed ahead of an output: in how many steps it had any,
    how many there were, and how many were accepted."""

    step_count: int = 0
    proposed_count: int = 0
    accepted_count: int = 0

    def __add__(self, other: Speculated) -> Speculated:
        return Speculated(
            self.step_count + other.step_count,
            self.proposed_count + other.proposed_count,
            self.accepted_count + other.accepted_count,
        )


class RequestTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happened to one request, for metrics and timelines; durations in seconds.

    arrived_s: on this server's monotonic clock, which its processes share.

    Stages from arrival at this server: reserve_s, then the transfer's queue_s, prefill_s and
    transfer_s, then first_token_s (messages and emission). They add up to ttft_s.
    status: "ok" or the kind of failure.
    """

    request_id: int
    peer: str = ""
    status: str = "ok"
    message: str = ""
    arrived_s: float = 0.0
    prompt_token_count: int = 0
    output_token_count: int = 0
    cached: CachedTokens = CachedTokens()
    retraction_count: int = 0
    reserve_s: float = 0.0
    transfer: TransferTrace = TransferTrace()
    first_token_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    e2e_s: float = 0.0
    origin: Origin = Origin()
    speculated: Speculated = Speculated()
