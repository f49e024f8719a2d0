"""Samples, which every API turns a body into: each is one prompt, one continuation, one request.

Values only; knows no JSON, no HTTP and no scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from common.frontend.bodies.dial_rules import DialRules
from common.request import NO_CLAIM, Bootstrap, Claim, SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that requests are checked against.

    request_token_max: prompt and output of one request, the smaller of context and KV pool.
    is_prefill: this server answers one token, and only to requests that name a room.
    model_names: the names that clients may use for the model. default_host, default_port: the
        prefill server that a room without an address is on; "" if there is no obvious one.
    dial_rules: which others a room may be on; None: no server is dialled.
    engine: this prefill server's incarnation; named_host: how its client calls it.
    request_timeout_s: the longest time of a request, and its time unless it asks for less.
    prefix_fingerprint: the server's, which the digests of prompts begin with; None: none are made.
    digest_lookahead: of these digests (see prefix_digests.py).
    plain: of requests without a room on a prefill server, where decode servers answer them; its
        request_token_max is 0 if none is connected.
    client: who asks, see `Claim`. is_low_first: smaller priorities are more urgent.
    encode: a text as token ids, without special ones; None: no field of this server is text.
    """

    vocab_size: int
    request_token_max: int
    is_prefill: bool
    model_names: tuple[str, ...]
    default_host: str = ""
    default_port: int = 0
    dial_rules: DialRules | None = None
    engine: str = ""
    named_host: str = ""
    request_timeout_s: float = 600.0
    prefix_fingerprint: Mapping[str, str] | None = None
    digest_lookahead: int = 0
    plain: Limits | None = None
    client: str = ""
    is_low_first: bool = False
    encode: Callable[[str], list[int]] | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """How output tokens become text. keeps_stop: the stop string stays in the text.

    regexes: the text ends with the token that completes a match of one; regex_field asked for them.
    min_new_tokens: stop strings are looked for after that many tokens. shown_ids: special tokens
    that have a text although others are skipped.
    """

    stops: tuple[str, ...] = ()
    keeps_stop: bool = False
    skip_special_tokens: bool = True
    min_new_tokens: int = 0
    regexes: tuple[str, ...] = ()
    regex_field: str = ""
    shown_ids: frozenset[int] = frozenset()


class Sample(msgspec.Struct, frozen=True):
    """One request for the scheduler. index: its place in the reply.

    prompt_text: "" if the client sent token ids.
    timeout_s: how long it may take, from here to its last token.
    hides_output: the client asked for no output, only for the prompt's log-probabilities; the
        token that the engine draws all the same is not shown.
    grammar_field: the field that asked for the grammar in `sampling`, for errors.
    prefix_digests: of the prompt, for the scheduler; b"" if nothing of it is kept or shared.
    prompt_index: of the prompt in its body; samples of one prompt differ by their seeds alone. -1
        for a sample that shares nothing.
    output_ids: what its client has had of the answer.
    claim: what decides whose turn it is.
    """

    index: int
    rid: str
    prompt_text: str
    token_ids: list[int]
    sampling: SamplingParams
    text: TextOptions
    bootstrap: Bootstrap | None = None
    hides_output: bool = False
    timeout_s: float = 600.0
    grammar_field: str = ""
    prefix_digests: bytes = b""
    prompt_index: int = -1
    output_ids: Sequence[int] = ()
    claim: Claim = NO_CLAIM
