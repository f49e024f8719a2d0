"""POST and PUT /generate in SGLang's shapes: single and batch, streamed and not.

Text, output_ids and log-probabilities of a stream are cumulative, as SGLang's are by default.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request, Response
from msgspec import structs

from common.frontend.bodies.bootstrap_address import limits_of
from common.frontend.bodies.fields import JsonObject
from common.frontend.bodies.reader import request_name, trace_parent
from common.frontend.bodies.unknown_names import known_names, unknown_names
from common.frontend.bodies.validation import GENERATE, GenerateCall, parse_generate
from common.frontend.context import FrontendContext
from common.frontend.http.api_keys import client_of
from common.frontend.http.errors import raise_failed
from common.frontend.http.headers import headers_of, warned
from common.frontend.http.streaming import DONE, answer, event
from common.frontend.requests.generation import Continuation, SampleGroup, request_limits
from common.frontend.requests.stages import trace_fields
from common.frontend.text.tokenizer import Tokenizer
from common.protocol.frontend import Failed
from common.request import FinishKind, Speculated, TokenLogprobs

PATH = "/generate"

# One token's log-probability in SGLang's order: value, token id, text or null.
Triple = tuple[float | None, int, str | None]


def build_router(context: FrontendContext) -> APIRouter:
    router = APIRouter()
    known = known_names(GENERATE)

    @router.api_route(PATH, methods=["POST", "PUT"])
    async def generate(request: Request) -> Response:
        client = client_of(headers_of(request.scope), context.config)
        limits = request_limits(context, lambda: request.url.hostname, client)
        rid = request_name(request)

        def read(body: JsonObject) -> tuple[GenerateCall, list[str]]:
            unknown = unknown_names(body, known, is_strict=context.config.strict_fields)
            checked = limits_of(body, limits)
            call = parse_generate(body, context.tokenizer, checked, rid, context.parsers)
            return call, unknown

        call, unknown = await context.bodies.read(request, read)
        await context.check_grammars(call.samples)
        run = GenerateRun(context, call, trace_parent(request))
        return warned(await answer(request, run, is_streaming=call.is_streaming), unknown)

    return router


class GenerateRun:
    """One body of /generate on its way to a reply."""

    def __init__(self, context: FrontendContext, call: GenerateCall, trace_parent: str) -> None:
        self._context = context
        self._trace_parent = trace_parent
        self._call = call
        self._began_at = context.clock.now()
        self._reasoning_counts: dict[int, int] = {}  # by index: of reasoning that has ended

    async def reply(self) -> object:
        """Raises: RequestError if one of the samples failed; the others are cancelled then."""
        async with SampleGroup(self._context, self._call.samples, self._trace_parent) as group:
            group.submit(is_streaming=False)
            async for ended in group.changes():
                raise_failed(one.failure for one in ended)
        items = [self._item(one) for one in group.continuations]
        return items if self._call.is_list else items[0]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Raises: RequestError before the first event; a later failure ends its own sample."""
        is_started = False
        async with SampleGroup(self._context, self._call.samples, self._trace_parent) as group:
            group.submit(is_streaming=True)
            async for grown in group.changes():
                if not is_started:
                    raise_failed([grown[0].failure])
                is_started = True
                told = b"".join(map(self._event, grown))
                yield told + DONE if group.is_over else told

    def _reasoning_count(self, one: Continuation) -> int:
        """Tokens up to the one that ends reasoning, if the output begins with it."""
        end_id, index = self._call.reasoning_end_id, one.sample.index
        if end_id is None:
            return 0
        if index not in self._reasoning_counts and end_id in one.token_ids:
            self._reasoning_counts[index] = one.token_ids.index(end_id) + 1
        return self._reasoning_counts.get(index, len(one.token_ids))

    def _event(self, one: Continuation) -> bytes:
        item = self._item(one)
        if self._call.is_list:
            item["index"] = one.sample.index
        return event(item)

    def _item(self, one: Continuation) -> dict[str, object]:
        spans = one.weight_spans.of_first(len(one.token_ids))
        meta: dict[str, object] = {
            "id": one.sample.rid,
            "finish_reason": finish_reason(one),
            "prompt_tokens": len(one.sample.token_ids),
            "weight_version": spans[-1][0]
            if spans
            else self._context.scheduler.calls.weights.version,
            "num_retractions": 0 if one.trace is None else one.trace.retraction_count,
            "total_retractions": 0 if one.trace is None else one.trace.retraction_count,
            "reasoning_tokens": self._reasoning_count(one),
            "completion_tokens": len(one.token_ids),
            "cached_tokens": one.cached.count,
            "cached_tokens_details": structs.asdict(one.cached),
            "dp_rank": 0,
        }
        if len(spans) > 1:
            meta["weight_versions"] = spans
        if one.is_ended:
            meta["e2e_latency"] = self._context.clock.now() - self._began_at
        if one.trace is not None:
            meta["timeline"] = trace_fields(one.trace)
            meta.update(speculation_fields(one.trace.speculated))
        if one.sample.sampling.return_logprob:
            texts = self._context.tokenizer if self._call.shows_logprob_text else None
            meta.update(logprob_fields(one, texts))
        item: dict[str, object] = {"text": one.text, "output_ids": one.token_ids, "meta_info": meta}
        if one.is_ended and self._call.transfer_params is not None:
            item["kv_transfer_params"] = self._call.transfer_params
        return item


def speculation_fields(speculated: Speculated) -> dict[str, object]:
    """SGLang's, of an output that tokens were proposed for; none of another one."""
    if not speculated.proposed_count:
        return {}
    return {
        "spec_verify_ct": speculated.step_count,
        "spec_draft_token_num": speculated.proposed_count,
        "spec_accept_token_num": speculated.accepted_count,
        "spec_accept_rate": speculated.accepted_count / speculated.proposed_count,
        "spec_accept_length": 1 + speculated.accepted_count / speculated.step_count,
    }


def finish_reason(one: Continuation) -> dict[str, object] | None:
    """SGLang's finish_reason; null while the sample runs."""
    if one.failure is not None:
        return _abort(one.failure.message, one.failure)
    if one.finish is None:
        return None
    match one.finish.kind:
        case FinishKind.STOP:
            return {"type": "stop", "matched": one.finish.matched}
        case FinishKind.LENGTH:
            return {"type": "length", "length": len(one.token_ids)}
        case FinishKind.ABORT:
            return _abort(one.finish.message, None)


def _abort(message: str, failed: Failed | None) -> dict[str, object]:
    return {
        "type": "abort",
        "message": message,
        "status_code": None if failed is None else failed.status,
        "err_type": None if failed is None else failed.kind,
    }


def logprob_fields(one: Continuation, texts: Tokenizer | None) -> dict[str, object]:
    """Log-probabilities of prompt and output. texts: adds the text of each token."""

    def triple(token_id: int, logprob: float | None) -> Triple:
        return (logprob, token_id, None if texts is None else texts.token_text(token_id))

    def own(entries: list[TokenLogprobs]) -> list[Triple]:
        return [triple(entry.token_id, entry.logprob) for entry in entries]

    def others(entries: list[TokenLogprobs], name: str) -> list[list[Triple] | None]:
        """The top or the asked ids at each position; null where nothing predicts the token."""
        pairs = [entry.top if name == "top" else entry.asked for entry in entries]
        return [
            None if entry.logprob is None else [triple(token_id, value) for token_id, value in many]
            for entry, many in zip(entries, pairs, strict=True)
        ]

    prompt, output = one.prompt_logprobs, one.logprobs
    fields: dict[str, object] = {
        "input_token_logprobs": own(prompt),
        "output_token_logprobs": own(output),
        "output_token_logprobs_length": len(output),
    }
    if one.sample.sampling.top_logprobs_num > 0:
        fields["input_top_logprobs"] = others(prompt, "top")
        fields["output_top_logprobs"] = others(output, "top")
    if one.sample.sampling.token_ids_logprob:
        fields["input_token_ids_logprobs"] = others(prompt, "asked")
        fields["output_token_ids_logprobs"] = others(output, "asked")
    return fields
