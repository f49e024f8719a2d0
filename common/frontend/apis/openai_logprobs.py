"""Log-probabilities in the shapes of both OpenAI APIs: what a body asks for, and how it is told.

Beside OpenAI's own fields there are vLLM's: prompt_logprobs, logprob_token_ids and
return_tokens_as_token_ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from common.frontend.bodies.body import TOKEN_IDS, Body, Json, read, refusal
from common.frontend.bodies.fields import JsonObject, check_token_ids
from common.frontend.bodies.sample import Limits
from common.frontend.text.tokenizer import Tokenizer
from common.request import SamplingParams, TokenLogprobs
from common.request_bounds import ASKED_LOGPROB_COUNT_MAX, TOP_LOGPROB_COUNT_MAX

ALL_TOKENS = -1
LOGPROB_MIN = -9999.0  # vLLM's and OpenAI's for a token that can't be
LIKELY = f"{ALL_TOKENS} for all tokens, or an integer in 0..{TOP_LOGPROB_COUNT_MAX}"
LikelyCount = Annotated[int, Meta(ge=ALL_TOKENS, le=TOP_LOGPROB_COUNT_MAX, description=LIKELY)]


class LogprobOptions(Body, frozen=True):
    """prompt_logprobs: likely tokens beside each one of the prompt. logprob_token_ids: tokens that
    are told of at each place of the output, instead of the likely ones."""

    prompt_logprobs: LikelyCount | None = None
    logprob_token_ids: (
        Annotated[
            list[Json],
            Meta(
                min_length=1,
                max_length=ASKED_LOGPROB_COUNT_MAX,
                description=f"a list of 1..{ASKED_LOGPROB_COUNT_MAX} token ids",
                extra_json_schema=TOKEN_IDS,
            ),
        ]
        | None
    ) = None
    return_tokens_as_token_ids: bool = False


class Told(msgspec.Struct, frozen=True):
    """What a call is told of log-probabilities.

    top_count: likely tokens beside each one of the output; None: nothing. asked_ids: these are told
    of instead. prompt_count: likely tokens beside each one of the prompt, in a list of their own;
    None: nothing. has_ids: a token is spelled as its id.
    """

    top_count: int | None = None
    asked_ids: tuple[int, ...] = ()
    prompt_count: int | None = None
    has_ids: bool = False

    def apply(self, params: SamplingParams, *, has_echo: bool) -> SamplingParams:
        """The parameters that bring it. has_echo: a prompt is told of as the output is."""
        if self.top_count is None and self.prompt_count is None:
            return params
        tells_likely = has_echo or not self.asked_ids
        counts = (self.top_count if tells_likely else 0, self.prompt_count)
        tells_prompt = self.prompt_count is not None or (has_echo and self.top_count is not None)
        return msgspec.structs.replace(
            params,
            return_logprob=True,
            top_logprobs_num=max(count or 0 for count in counts),
            token_ids_logprob=self.asked_ids,
            logprob_start_len=0 if tells_prompt else -1,
        )


NOTHING_TOLD = Told()

# ---- readers -------------------------------------------------------------------------------------


def read_told(
    body: JsonObject, name: str, top_count: int | None, limits: Limits, *, is_told: bool = True
) -> Told:
    """name, top_count: of the field that says how many likely tokens are told, None if nothing is.
    is_told: the output is told of at all. Raises: RequestError."""
    given = read(LogprobOptions, body)
    asked_ids: tuple[int, ...] = ()
    if given.logprob_token_ids is not None:
        key = "logprob_token_ids"
        if top_count is None or not is_told:
            allowed = "absent, since no log-probabilities of the output are asked for"
            raise refusal(key, given.logprob_token_ids, allowed)
        ids = check_token_ids(given.logprob_token_ids, key, limits.vocab_size)
        asked_ids = tuple(dict.fromkeys(ids))
    if given.prompt_logprobs is not None and body.get("stream") is True:
        raise refusal("prompt_logprobs", given.prompt_logprobs, "absent, since stream is true")
    return Told(
        top_count=_count_of(name, top_count, limits),
        asked_ids=asked_ids,
        prompt_count=_count_of("prompt_logprobs", given.prompt_logprobs, limits),
        has_ids=given.return_tokens_as_token_ids,
    )


def _count_of(name: str, count: int | None, limits: Limits) -> int | None:
    """-1 is every token of the vocabulary, as far as so many are told."""
    if count != ALL_TOKENS:
        return count
    if limits.vocab_size > TOP_LOGPROB_COUNT_MAX:
        allowed = (
            f"0..{TOP_LOGPROB_COUNT_MAX}: {ALL_TOKENS} stands for all tokens, and the model has "
            f"{limits.vocab_size}"
        )
        raise refusal(name, count, allowed)
    return limits.vocab_size


# ---- writers -------------------------------------------------------------------------------------


class LogprobWriter:
    """Spells what is told of tokens."""

    def __init__(self, tokenizer: Tokenizer, told: Told) -> None:
        self._tokenizer = tokenizer
        self._told = told

    @property
    def tells_output(self) -> bool:
        return self._told.top_count is not None

    def text(self, token_id: int) -> str:
        if self._told.has_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, object] | None:
        """The `logprobs` of a chat's choice."""
        if not self.tells_output:
            return None
        return {"content": [self.entry(entry) for entry in entries]}

    def top_by_text(self, entry: TokenLogprobs, *, is_prompt: bool) -> dict[str, float] | None:
        """Of completions: text -> log-probability, the token's own included; the likelier of equal
        texts. None where nothing predicts the token."""
        if entry.logprob is None:
            return None
        top: dict[str, float] = {}
        others = entry.top[: self._told.top_count] if is_prompt else self._others(entry)
        for token_id, logprob in [*others, (entry.token_id, entry.logprob)]:
            text = self.text(token_id)
            top[text] = max(logprob, top.get(text, LOGPROB_MIN))
        return top

    def prompt(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, object] | None]:
        """vLLM's `prompt_logprobs`: by token id; null where nothing predicts the token."""
        return [self._ranked(entry) for entry in entries]

    def _others(self, entry: TokenLogprobs) -> list[tuple[int, float]]:
        """What stands beside a token of the output."""
        return entry.asked if self._told.asked_ids else entry.top[: self._told.top_count]

    def entry(self, entry: TokenLogprobs) -> dict[str, object]:
        """Of chats and responses."""
        top = [self._chat_token(token_id, logprob) for token_id, logprob in self._others(entry)]
        return {**self._chat_token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _chat_token(self, token_id: int, logprob: float | None) -> dict[str, object]:
        """bytes: the token's own, exact also where its text is a part of a character."""
        return {
            "token": self.text(token_id),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
            "logprob": logprob,
        }

    def _ranked(self, entry: TokenLogprobs) -> dict[str, object] | None:
        if entry.logprob is None:
            return None
        own = (entry.token_id, entry.logprob, entry.rank or None)
        likely = entry.top[: self._told.prompt_count]
        ranked = [own, *((i, value, rank) for rank, (i, value) in enumerate(likely, 1))]
        return {
            str(token_id): {
                "logprob": max(value, LOGPROB_MIN),
                "rank": rank,
                "decoded_token": self._tokenizer.token_text(token_id),
            }
            for token_id, value, rank in ranked
        }
