"""What a request asks for and what is told of it afterwards. Plain values that cross processes.

Knows nothing of HTTP bodies, pages or peers. Stop *strings* never come here: the frontend, which
owns the tokenizer, matches them and cancels the request.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens of one request are drawn. Validated by the frontend; see SGLang's sampling_params.

    temperature: 0 means greedy. top_k: -1 means all. min_p: relative to the largest probability.
    seed: always set; the noise of the token at position p depends on (seed, p) alone, so the output
        does not depend on what else is in the batch, nor on which server draws it.
    repetition_penalty counts prompt and output tokens; presence and frequency count output only.
    max_new_tokens, min_new_tokens: counted from the end of the prompt.
    top_logprobs_num, token_ids_logprob: what is reported per token if return_logprob.
    logprob_start_len: index of the first prompt token whose log-probability is wanted; -1 for none.
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


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: of the token itself, the top-k, and the asked-for ids.

    logprob is None for the first token of a prompt, which nothing predicts.
    """

    token_id: int
    logprob: float | None
    top: list[tuple[int, float]] = []
    asked: list[tuple[int, float]] = []


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


class Bootstrap(msgspec.Struct, frozen=True):
    """Where a router told both servers to meet. room: 0 .. 2**63 - 1."""

    host: str
    port: int
    room: int


class HandOverTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """The prefill server's account of one hand-over; durations in seconds on its own clock.

    queue_s: reservation arrived to first chunk scheduled. prefill_s: to last chunk computed and
    first token sampled. transfer_s: from there to the last flush (what was not hidden behind
    compute). wire_s: sum over batches of the time from submit to flush. exposed_nbytes: bytes that
    were still to move when the last layer of the last chunk was computed.
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


class RequestTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happened to one request, for metrics and timelines; durations in seconds.

    Stages from arrival at this server: reserve_s, then the hand-over's queue_s, prefill_s and
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
    cached_token_count: int = 0
    retraction_count: int = 0
    reserve_s: float = 0.0
    hand_over: HandOverTrace = HandOverTrace()
    first_token_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    e2e_s: float = 0.0
