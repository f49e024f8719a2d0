"""Runs samples: submits them, turns their tokens into text, ends them at a stop string.

Between the APIs, which know bodies and replies, and the scheduler client, which knows tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Self

from common.config import ANY_HOST, Role
from common.errors import GrammarError, ProtocolError, RequestError
from common.failures import FailureKind
from common.frontend.bodies.dial_rules import dial_rules
from common.frontend.bodies.sample import Limits, Sample
from common.frontend.context import FrontendContext
from common.frontend.requests.request_handle import Asked, RequestHandle, SampleId
from common.frontend.requests.weight_spans import WeightSpans
from common.frontend.text.stop_strings import StopStrings
from common.frontend.text.tokenizer import Tokenizer
from common.grammar import RegexWatch
from common.protocol.codec import decode_logprobs
from common.protocol.frontend import Failed, Tokens
from common.request import CachedTokens, FinishKind, FinishReason, RequestTrace, TokenLogprobs

# Names that stand for "whatever is served": SGLang's default, and what its router fills in.
ANY_MODEL_NAMES = ("default", "unknown")
STOPPED = "a stop string matched"


@dataclass(frozen=True, slots=True)
class Finish:
    """matched: the token id or the stop string that ended the text."""

    kind: FinishKind
    matched: int | str | None = None
    message: str = ""


class Continuation:
    """The output of one sample as it grows; it has ended once `finish` or `failure` is set.

    pieces: the text so far, safe to show. logprobs: one per token if asked for. text_starts: where
    in the text each token begins, in characters. weight_spans: what made its tokens, and those cut
    off behind them.
    """

    def __init__(
        self,
        sample: Sample,
        tokenizer: Tokenizer,
        watches: Sequence[tuple[str, RegexWatch]] = (),
        *,
        is_prefill: bool,
    ) -> None:
        self.sample = sample
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.text_starts: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.cached = CachedTokens()
        self.weight_spans = WeightSpans()
        self.finish: Finish | None = None
        self.failure: Failed | None = None
        self.trace: RequestTrace | None = None
        self._is_prefill = is_prefill
        self._detokenizer = tokenizer.detokenizer(
            sample.token_ids,
            skip_special_tokens=sample.text.skip_special_tokens,
            shown_ids=sample.text.shown_ids,
        )
        self._watches = watches
        self._matched_regex: str | None = None
        self._stops = StopStrings(sample.text.stops, keeps_match=sample.text.keeps_stop)
        self._decoded_length = 0  # characters, shown, held back or cut off
        self._shown_length = 0
        self._settled_count = 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def is_stopped(self) -> bool:
        """A stop string or expression matched; the scheduler may not know yet."""
        return self._matched_stop is not None

    @property
    def _matched_stop(self) -> str | None:
        return self._matched_regex if self._stops.matched is None else self._stops.matched

    @property
    def is_ended(self) -> bool:
        return self.finish is not None or self.failure is not None

    def settled_count(self) -> int:
        """How many tokens have begun to show; all at the end, but those cut off by a stop string.

        Never shrinks: what is told of these tokens need not be taken back.
        """
        if self.finish is not None and self._stops.matched is None:
            return len(self.token_ids)
        starts = self.text_starts
        while self._settled_count < len(starts):
            if starts[self._settled_count] >= self._shown_length:
                break
            self._settled_count += 1
        return self._settled_count

    def take(self, message: Tokens | Failed) -> None:
        """Add what the scheduler says. After a stop string only the trace is of interest."""
        if isinstance(message, Failed):
            self.trace = message.trace
            if self.is_stopped:
                self._end(None)
            elif (
                message.kind == FailureKind.ABORTED
            ):  # its client asked for what there is, not for an error
                self._end(FinishReason(FinishKind.ABORT, message=message.message))
            else:
                self.failure = message
            return
        if message.cached.count > self.cached.count:
            self.cached = message.cached
        if (
            message.prompt_logprobs and not self._is_prefill
        ):  # a router joins both servers' lists: one of them is empty
            self.prompt_logprobs += _read_logprobs(message.prompt_logprobs)
        if not self.sample.hides_output:
            self._take_tokens(message)
        if message.finish is not None:
            self.trace = message.trace
            self._end(message.finish)

    def _take_tokens(self, message: Tokens) -> None:
        last = len(message.token_ids) - 1
        for place, token_id in enumerate(message.token_ids):
            if self.is_stopped:
                return
            self.token_ids.append(token_id)
            self.text_starts.append(self._decoded_length)
            if message.logprobs:
                self.logprobs.append(message.logprobs[place])
            is_stop = place == last and self._is_stop_token(token_id, message.finish)
            if not is_stop or self.sample.text.keeps_stop:
                self._take_text(self._detokenizer.push(token_id))

    def _is_stop_token(self, token_id: int, finish: FinishReason | None) -> bool:
        return finish is not None and finish.kind is FinishKind.STOP and finish.matched == token_id

    def _take_text(self, piece: str) -> None:
        self._decoded_length += len(piece)
        if len(self.token_ids) <= self.sample.text.min_new_tokens:
            self._show(piece)
            return
        self._show(self._stops.push(piece))
        if self._watches and self._stops.matched is None:
            self._watch(piece)

    def _watch(self, piece: str) -> None:
        """End the text behind a piece with which an expression matches. Raises: RequestError."""
        for regex, watch in self._watches:
            try:
                is_matched = watch.push(piece)
            except GrammarError as error:
                field = self.sample.text.regex_field
                raise RequestError(f"{field}={regex!r}: {error}", field=field) from error
            if is_matched:
                self._matched_regex = regex
                self._show(self._stops.flush())
                return

    def _show(self, piece: str) -> None:
        if piece:
            self.pieces.append(piece)
            self._shown_length += len(piece)

    def _end(self, reason: FinishReason | None) -> None:
        """reason: the scheduler's; what a stop string says goes first."""
        if not self.is_stopped and not self.sample.hides_output:
            self._take_text(self._detokenizer.flush())
        if self._matched_stop is not None:
            self.finish = Finish(FinishKind.STOP, self._matched_stop)
            return
        self._show(self._stops.flush())
        assert reason is not None, "only a stop string ends a request before the scheduler does"
        is_abort = reason.kind is FinishKind.ABORT
        if not is_abort and (self._is_prefill or self.sample.hides_output):
            self.finish = Finish(FinishKind.LENGTH)
        else:
            self.finish = Finish(reason.kind, reason.matched, reason.message)


def _read_logprobs(chunks: list[bytes]) -> list[TokenLogprobs]:
    """Raises: RequestError if another server's words can't be read."""
    try:
        return [entry for chunk in chunks for entry in decode_logprobs(chunk)]
    except ProtocolError as exc:
        raise RequestError(f"from the prefill server: {exc}", status=500) from exc


class SampleGroup:
    """All samples of one body, submitted together; leaving the block cancels what is still open.

    trace_parent: the span that the body belongs to, "" for none.
    """

    def __init__(
        self, context: FrontendContext, samples: Sequence[Sample], trace_parent: str
    ) -> None:
        is_prefill = context.config.role is Role.PREFILL
        self.continuations = [
            Continuation(
                sample,
                context.tokenizer,
                context.grammars.watches(sample),
                is_prefill=is_prefill and sample.bootstrap is not None,
            )
            for sample in samples
        ]
        self._context = context
        self._trace_parent = trace_parent
        self._is_streaming = False
        self._open_count = len(self.continuations)
        self._handles = ExitStack()
        self._changed: dict[int, Continuation] = {}  # by index: one entry per sample at most
        self._broken: Exception | None = None  # the first mistake in reading what came
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None

    def submit(self, *, is_streaming: bool) -> None:
        """is_streaming: whether `changes` tells of every step, or only of samples that have ended.

        Raises: RequestError if the scheduler takes one of them not; then none goes on.
        """
        self._is_streaming = is_streaming
        with ExitStack() as handles:
            submitted = [
                (one, handles.enter_context(handle))
                for group in self._with_equal_prompts()
                for one, handle in zip(group, self._submit(group), strict=True)
            ]
            self._handles = handles.pop_all()
        for one, handle in submitted:
            one.weight_spans = handle.weight_spans
            handle.tell(partial(self._grow, one, handle))

    def _with_equal_prompts(self) -> list[list[Continuation]]:
        """Those that share a prompt and a room."""
        groups: list[list[Continuation]] = []
        for one in self.continuations:
            last = groups[-1][0].sample if groups else None
            sample = one.sample
            if (
                last is not None
                and last.prompt_index == sample.prompt_index >= 0
                and last.bootstrap == sample.bootstrap
            ):
                groups[-1].append(one)
            else:
                groups.append([one])
        return groups

    def _submit(self, group: list[Continuation]) -> list[RequestHandle]:
        first = group[0].sample
        asked = Asked(
            first.token_ids,
            first.sampling,
            first.timeout_s,
            first.bootstrap,
            first.prefix_digests,
            self._trace_parent,
            first.claim,
        )
        samples = [SampleId(one.sample.rid, one.sample.sampling.seed) for one in group]
        context = self._context
        is_plain = context.config.role is Role.PREFILL and first.bootstrap is None
        submit = (context.relays if is_plain else context.scheduler).submit_samples
        return submit(asked, samples, is_streaming=self._is_streaming)

    def _grow(self, one: Continuation, handle: RequestHandle) -> None:
        """Called as tokens come, not when they are read: a slow client's stop string still stops.

        There is no task per sample, so that a token costs one switch of tasks, not two.
        """
        try:
            for message in handle.take():
                one.take(message)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is of this body, see `changes`
            self._broken = self._broken or exc
        if one.is_stopped:
            handle.stop(STOPPED)
        if not (self._is_streaming or one.is_ended or self._broken):
            return
        self._changed[one.sample.index] = one
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._handles.close()

    @property
    def is_over(self) -> bool:
        """Whether `changes` has told of the end of every sample."""
        return not self._open_count

    async def changes(self) -> AsyncIterator[list[Continuation]]:
        """The samples that have grown, until all have ended; several steps may come as one."""
        while not self.is_over:
            if not self._changed:
                # Not an asyncio.Event: that asks the system for the process's id at every wait.
                self._waiting = self._loop.create_future()
                await self._waiting
            if self._broken is not None:
                raise self._broken
            changed, self._changed = list(self._changed.values()), {}
            for one in changed:
                self._open_count -= one.is_ended
            yield changed


@cache
def model_names(served: str, aliases: tuple[str, ...], path: str) -> tuple[str, ...]:
    """What clients may call the model: by the names that it is served under, by its path or any end
    of that, as peers name it that were given a relative one; or by a name that stands for any."""
    parts = Path(path).parts
    ends = ("/".join(parts[start:]) for start in range(len(parts) - 1, 0, -1))
    return tuple(dict.fromkeys((served, *aliases, path, *ends, *ANY_MODEL_NAMES)))


def request_limits(
    context: FrontendContext,
    find_host: Callable[[], str | None] = lambda: None,
    client: str = "",
) -> Limits:
    """What bodies are checked against. find_host: the one that the request's own URL names.
    client: who asks, see `Claim`.

    Raises: RequestError 503 while the server starts.
    """
    known = context.scheduler.server_info
    if known is None:
        raise RequestError("the server is still starting", status=503)
    config = context.config
    is_prefill = config.role is Role.PREFILL
    host, port = config.host if is_prefill else "", config.bootstrap_port
    wanted = context.peers.wanted
    if len(wanted.addresses) == 1:
        host, _, digits = wanted.addresses[0].rpartition(":")
        port = int(digits)
    limits = Limits(
        vocab_size=known.vocab_size,
        request_token_max=known.request_token_max,
        is_prefill=is_prefill,
        model_names=model_names(config.served_model_name, config.model_aliases, config.model_path),
        default_host=host,
        default_port=port,
        engine=known.incarnation if is_prefill else "",
        named_host=_named_host(config.host, find_host) if is_prefill else "",
        request_timeout_s=config.request_timeout_s,
        prefix_fingerprint=None if config.disable_radix_cache else known.fingerprint,
        digest_lookahead=config.digest_lookahead,
        dial_rules=None if is_prefill else dial_rules(config.bootstrap_allow, wanted.allowed),
        client=client,
        is_low_first=config.schedule_low_priority_values_first,
        encode=partial(context.tokenizer.encode, add_special_tokens=False),
    )
    if not config.serve_plain:
        return limits
    token_max = context.fleet.request_token_max
    return replace(limits, plain=replace(limits, is_prefill=False, request_token_max=token_max))


def _named_host(own: str, find_host: Callable[[], str | None]) -> str:
    return (find_host() or "") if own in ANY_HOST else own
