"""One request on the decode server. `requests` is its only writer."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from common.protocol.frontend import Sibling, Submit
from common.request import (
    Bootstrap,
    CachedTokens,
    Claim,
    Origin,
    RequestTrace,
    SamplingParams,
    Speculated,
    TransferTrace,
)
from common.scheduling.cached_sequences import HeldPrefix
from common.scheduling.forks import SamplePages
from common.scheduling.sequence import Sequence
from common.scheduling.transitions import DecodeState
from common.transfers.incoming_transfer import Ask, IncomingTransfer

TEST_TOKEN_ID = 0


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """token_ids: the prompt and everything generated so far.

    digests: of its tokens' beginnings (see prefix_digests.py).
    held: what is here of its cache while the rest is on its way. asked_at: when that was asked for.
    link, source_name: of the server that its cache comes from; "" if it is computed here.
    failure_count: transfers that brought nothing since it last ran; tried_links: the prefill
    servers that failed them.
    is_computed_here: no prefill server is looked for any more.
    tested_link: of the prefill server that this is a self-test of; it has no client then.
    is_sample: it is one of several answers to its prompt.
    children: samples of clients that wait for this one's cache, in the order of its seeds, of which
    some may have left; it has no client of its own then. parent: whose cache a sample waits for.
    sample_pages: for all children but one, what each has beside its blocks.
    sample_index: of a sample, its place among those of its prompt.
    claim: what decides whose turn it is.
    """

    request_id: int
    token_ids: list[int]
    prompt_count: int
    sampling: SamplingParams
    bootstrap: Bootstrap | None
    digests: bytes
    arrived_at: float
    deadline: float
    state: DecodeState = DecodeState.WAITING
    link: str = ""
    transfer: IncomingTransfer | None = None
    held: HeldPrefix | None = None
    sequence: Sequence | None = None
    failure_count: int = 0
    retraction_count: int = 0
    speculated: Speculated = field(default_factory=Speculated)
    is_computed_here: bool = False
    tested_link: str = ""
    is_sample: bool = False
    parent: DecodeRequest | None = None
    children: list[DecodeRequest] = field(default_factory=list)
    seeds: tuple[int, ...] = ()
    sample_pages: list[SamplePages] = field(default_factory=list)
    sample_index: int = 0
    tried_links: set[str] = field(default_factory=set)
    prompt_logprobs: list[bytes] = field(default_factory=list)
    waiting_since: float = 0.0
    requested_at: float = 0.0
    asked_at: float = 0.0
    first_token_at: float = 0.0
    transfer_trace: TransferTrace = field(default_factory=TransferTrace)
    cached: CachedTokens = field(default_factory=CachedTokens)
    source_name: str = ""
    origin: Origin = field(default_factory=Origin)
    claim: Claim = field(default_factory=Claim)

    @property
    def output_count(self) -> int:
        return len(self.token_ids) - self.prompt_count

    @property
    def has_client(self) -> bool:
        return not self.tested_link and not self.seeds

    @property
    def sample_count(self) -> int:
        """Sequences that decode once its cache is there."""
        return max(1, len(self.children))

    @property
    def is_held(self) -> bool:
        """Whether a prefill server says that it has computed the prompt and holds its cache. Any
        other can compute it again."""
        return self.bootstrap is not None and bool(self.bootstrap.engine) and not self.output_count

    @property
    def room(self) -> int | None:
        """Where its other half is met: a routed request that has produced nothing yet is known to
        its prefill server by its room. None: its tokens are sent along."""
        return self.bootstrap.room if self.bootstrap is not None and not self.output_count else None

    @property
    def bootstrap_link(self) -> str | None:
        """The one prefill server that can serve this request: the router's choice, for as long as
        that server alone knows the prompt's other half. None: any can."""
        if self.tested_link:
            return self.tested_link
        if self.bootstrap is None or self.output_count > 0:
            return None
        return f"{self.bootstrap.host}:{self.bootstrap.port}"

    def trace(self, now: float, *, status: str = "ok", message: str = "") -> RequestTrace:
        """Stage times that add up to ttft_s; first_token_s is what nothing else explains."""
        requested_at = self.requested_at or now
        first_token_at = self.first_token_at or now
        stages = self.transfer_trace
        explained = stages.queue_s + stages.prefill_s + stages.transfer_s
        return RequestTrace(
            request_id=self.request_id,
            peer=self.source_name,
            status=status,
            message=message,
            arrived_s=self.arrived_at,
            prompt_token_count=self.prompt_count,
            output_token_count=self.output_count,
            cached=self.cached,
            retraction_count=self.retraction_count,
            reserve_s=requested_at - self.arrived_at,
            transfer=stages,
            first_token_s=max(0.0, first_token_at - requested_at - explained),
            ttft_s=first_token_at - self.arrived_at,
            decode_s=now - first_token_at,
            e2e_s=now - self.arrived_at,
            origin=self.origin,
            speculated=self.speculated,
        )

    def ask(self, now: float) -> Ask:
        """What is asked of a prefill server. One that meets it by its room needs no tokens."""
        room, sampling = self.room, self.sampling
        if self.output_count > 0:
            # Its prompt's log-probabilities have been sent to the client already.
            sampling = msgspec.structs.replace(sampling, logprob_start_len=-1)
        return Ask(
            room=room,
            token_ids=[] if room is not None else list(self.token_ids),
            prompt_count=0 if room is not None else self.prompt_count,
            sampling=None if room is not None else sampling,
            budget_s=self.deadline - now,
            origin=self.origin,
            is_self_test=bool(self.tested_link),
            is_held=self.is_held,
            prefix_digests=b"" if room is not None else self.digests,
            seeds=() if room is not None else self.seeds,
            claim=self.claim,
        )


def new_request(submit: Submit, sample: Sibling, now: float) -> DecodeRequest:
    """A sample of a body, which waits from now on. Its room is not looked at."""
    sampling = msgspec.structs.replace(submit.sampling, seed=sample.seed)
    if submit.output_ids:
        # The prompt's log-probabilities went to the client with the first token.
        sampling = msgspec.structs.replace(sampling, logprob_start_len=-1)
    return DecodeRequest(
        request_id=sample.request_id,
        token_ids=[*submit.token_ids, *submit.output_ids],
        prompt_count=len(submit.token_ids),
        sampling=sampling,
        bootstrap=None,
        digests=submit.prefix_digests,
        arrived_at=now,
        deadline=now + submit.budget_s,
        waiting_since=now,
        is_sample=bool(submit.siblings),
        origin=sample.origin,
        claim=submit.claim,
    )


def new_self_test(request_id: int, link: str, budget_s: float, now: float) -> DecodeRequest:
    """A prompt of one token, for one token, from the prefill server at a link."""
    return DecodeRequest(
        request_id=request_id,
        token_ids=[TEST_TOKEN_ID],
        prompt_count=1,
        sampling=SamplingParams(max_new_tokens=1, seed=0, temperature=0.0, ignore_eos=True),
        bootstrap=None,
        digests=b"",
        arrived_at=now,
        deadline=now + budget_s,
        waiting_since=now,
        tested_link=link,
    )


def why_misfit(submit: Submit, request_token_max: int, *, is_local: bool) -> str:
    """Why a body is none that this server could ever answer; "" if it is. is_local: it computes all
    prompts itself."""
    token_count, output_count = len(submit.token_ids), len(submit.output_ids)
    if not 1 <= token_count < request_token_max:
        return f"prompt of {token_count} tokens: must be 1..{request_token_max - 1}"
    if submit.bootstrap is not None and not submit.bootstrap.engine and is_local:
        return "bootstrap_room: this server was started with --prefill none"
    if not output_count:
        return ""
    output_max = min(submit.sampling.max_new_tokens, request_token_max - token_count)
    if output_count >= output_max:
        return f"output of {output_count} tokens: must be fewer than {output_max} to go on"
    if submit.siblings:
        return f"output of {output_count} tokens: must be of one sample, not {len(submit.samples)}"
    return ""
