"""Every request of the decode server: its table, queue and deadlines, and each change of its state.

One method per row of `DECODE_TABLE`; nothing else assigns to a request. The client is answered at
once. Pages that a remote writer may still reach stay with their transfer, pages that a running step
may still write are closed after it. Decides nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from operator import add

import msgspec

from common.failures import Failure
from common.protocol.frontend import Failed, Submit
from common.request import CachedTokens, FinishReason, TokenLogprobs, TransferTrace
from common.scheduling.batcher import Batcher
from common.scheduling.deadlines import Deadlines
from common.scheduling.fair_share import OUTPUT_TOKEN_COST
from common.scheduling.page_account import PageAccount
from common.scheduling.peers import Outbox
from common.scheduling.prefix_cache import Match
from common.scheduling.sequence import Sequence
from common.scheduling.transitions import DecodeEvent, next_decode_state
from common.scheduling.waiting_queue import WaitingQueue
from common.transfers.connection import Connection
from common.transfers.incoming_transfer import CacheReady
from common.transfers.transfers import Transfers
from decode_server.answers import Answers
from decode_server.arriving_blocks import ArrivingBlocks
from decode_server.drain_rate import DrainRate
from decode_server.request import DecodeRequest, new_request, new_self_test
from decode_server.rooms import Rooms
from decode_server.samples import Samples

COUNTED = ("retracted", "retried", "holds_lost")
TRANSFER_ID_BITS = 63


class Requests:
    """Owner of every `DecodeRequest`. samples: whose cache some wait for. answers: what clients are
    told. arriving: what the transfers under way bring. drain_rate: how fast the queue does."""

    def __init__(
        self,
        incarnation: str,
        account: PageAccount,
        batcher: Batcher,
        transfers: Transfers,
        outbox: Outbox,
        rng: random.Random,
    ) -> None:
        self._account = account
        self._batcher = batcher
        self._transfers = transfers
        self._outbox = outbox
        self._rng = rng
        self._requests: dict[int, DecodeRequest] = {}
        self._next_own_id = -1  # clients' requests have positive ones
        self.drain_rate = DrainRate()
        self._rooms = Rooms(incarnation, transfers.links, outbox)
        self.arriving = ArrivingBlocks(account.cache)
        self.deadlines = Deadlines()
        self.queue: WaitingQueue[DecodeRequest] = WaitingQueue()
        self.samples = Samples(account)
        self.answers = Answers(outbox)
        self._ended: list[tuple[DecodeRequest, Sequence]] = []
        self._counters = dict.fromkeys(COUNTED, 0.0)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(list(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: int | None) -> DecodeRequest | None:
        return self._requests.get(request_id) if request_id is not None else None

    def of_sequence(self, sequence: Sequence) -> DecodeRequest:
        return self._requests[sequence.request_id]

    @property
    def counters(self) -> dict[str, float]:
        return {**self.answers.counters, **self._counters}

    @property
    def client_count(self) -> int:
        """Requests that a client waits for."""
        return sum(request.has_client for request in self._requests.values())

    @property
    def waiting_count(self) -> int:
        """Those of clients that wait."""
        return self.samples.count_in(self.queue)

    @property
    def transferring(self) -> list[DecodeRequest]:
        """Those whose cache is on its way."""
        owners = [self.get(transfer.owner) for transfer in self._transfers.incoming.under_way]
        return [request for request in owners if request is not None]

    def take_expired(self, now: float) -> list[DecodeRequest]:
        """Requests whose time budget is used up."""
        late = [self.get(request_id) for request_id in self.deadlines.take_expired(now)]
        return [one for one in late if one is not None and one.deadline <= now]

    # ---- they come -------------------------------------------------------------------------------

    def submit(self, submit: Submit, now: float) -> list[DecodeRequest]:
        """A client's requests: the samples of one prompt. Returns those that are queued. A room is
        for the first ones, as many as share a cache; any prefill server computes the others'."""
        queued: list[DecodeRequest] = []
        for samples in self.samples.groups_of(submit):
            children = [new_request(submit, sample, now) for sample in samples]
            if len(children) == 1:
                (parent,) = children
            else:
                own = msgspec.structs.replace(samples[0], request_id=self._take_own_id())
                parent = new_request(submit, own, now)
                self.samples.join(parent, children)
                self._requests[parent.request_id] = parent
            for child in children:
                self._requests[child.request_id] = child
                self.deadlines.add(child.request_id, child.deadline)
            if submit.output_ids:
                # It has begun before, here or elsewhere: it waits as one that was retracted.
                parent.digests = self._account.cached.digests_of(parent.digests, parent.token_ids)
                self.queue.add_again(parent)
            else:
                parent.bootstrap = None if queued else submit.bootstrap
                self.queue.add(parent)
            queued.append(parent)
        return queued

    def refuse(self, submit: Submit, failure: Failure) -> None:
        """A client's requests are not taken; neither is their other half to wait."""
        for sample in submit.samples:
            self._outbox.to_frontend(Failed.of(sample.request_id, failure))
        if submit.bootstrap is not None:
            self._rooms.withdraw(submit.bootstrap, failure.message)

    def submit_test(self, link: str, budget_s: float, now: float) -> None:
        """A self-test of the prefill server at a link."""
        request = new_self_test(self._take_own_id(), link, budget_s, now)
        self._requests[request.request_id] = request
        self.queue.add(request)
        self.deadlines.add(request.request_id, request.deadline)

    def _take_own_id(self) -> int:
        self._next_own_id -= 1
        return self._next_own_id + 1

    # ---- while they wait -------------------------------------------------------------------------

    def unbind(self, request: DecodeRequest) -> None:
        """Its room or its held cache is lost to it: any prefill server may compute it."""
        self._counters["holds_lost"] += request.is_held
        request.bootstrap = None

    def keep_here(self, request: DecodeRequest) -> None:
        """No prefill server is looked for any more."""
        request.is_computed_here = True

    # ---- rows of the table -----------------------------------------------------------------------

    def reserve(self, request: DecodeRequest, source: Connection, match: Match, now: float) -> None:
        """WAITING -> TRANSFERRING: pages for what is not here of the cache are there, and are asked
        to be filled. What is here is kept meanwhile."""
        self._advance(request, DecodeEvent.RESERVED)
        self.queue.discard(request)
        token_count = len(request.token_ids)
        transfer_id = self._rng.getrandbits(TRANSFER_ID_BITS)
        incoming = self._transfers.incoming
        request.held = self._account.cached.hold(match)
        prefix = request.held.prefix if request.held is not None else None
        self.arriving.add(request, match.block_count)
        request.transfer = incoming.reserve(
            source, transfer_id, request.request_id, token_count, request.ask(now), prefix
        )
        self.samples.reserve(request)
        self._note_begun(request, match, now)
        request.asked_at = now
        self._transfers.links.note_asked(source, token_count, now)
        request.link = source.link
        request.source_name = source.name

    def compute_here(self, request: DecodeRequest, match: Match, now: float) -> None:
        """WAITING -> RUNNING, if there are pages: this server computes what is not here of the
        prompt's cache."""
        tokens, digests = request.token_ids, request.digests
        needs = self._account.needs_behind(match, len(tokens))
        beside = self.samples.needs(request)
        if not self._account.can_allocate(list(map(add, needs, beside))):
            return
        sequence = self._account.open(
            request.request_id, tokens, request.prompt_count, request.sampling, digests, match
        )
        if sequence is None:
            return
        self.samples.reserve(request)
        sequence.samples = self.samples.draws(request)
        sequence.priority = request.claim.priority
        self._advance(request, DecodeEvent.SCHEDULED_HERE)
        self.queue.discard(request)
        request.sequence = sequence
        request.link = request.source_name = ""
        self._note_begun(request, match, now)
        self._batcher.add(sequence)

    def adopt(self, request: DecodeRequest, ready: CacheReady, now: float) -> FinishReason | None:
        """TRANSFERRING -> RUNNING: the cache is there, and its first token. Returns why that is
        the last one, if it is. One with samples has no token, and is to be forked at once."""
        done = ready.done
        self._advance(request, DecodeEvent.DONE)
        if request.first_token_at == 0.0:
            request.transfer_trace = done.trace
            here = request.held.token_count if request.held is not None else 0
            request.cached = CachedTokens(prefill=done.trace.cached_token_count, decode=here)
            request.prompt_logprobs = done.prompt_logprobs
            spared_count = max(0, request.cached.prefill - here)
            self.queue.share.charge(request.claim.client, -spared_count)
        request.transfer = None
        if not request.children:
            request.token_ids.append(done.first_token)
        self.arriving.remove(request)
        held, request.held = request.held, None
        sequence = self._account.adopt(
            request.request_id,
            request.token_ids,
            request.prompt_count,
            request.sampling,
            ready.transfer.spans,
            done.token_count,
            request.digests,
            held,
        )
        sequence.priority = request.claim.priority
        sequence.first_proposals = done.proposals
        request.sequence = sequence
        if request.children:
            return None
        self._batcher.add(sequence)
        return self._batcher.limits.finish_of(sequence)

    def fork(
        self,
        parent: DecodeRequest,
        tokens: Mapping[int, int],
        logprobs: Mapping[int, TokenLogprobs],
        now: float,
        *,
        is_known: bool,
    ) -> None:
        """RUNNING -> FINISHED of a prompt whose cache is there; WAITING -> RUNNING of its samples.

        tokens, logprobs: of each sample, the first one. A sample without waits alone from now on.
        is_known: whether our workers drew them, and so know the samples.
        """
        prompt, parent.sequence = parent.sequence, None
        assert prompt is not None
        going: list[Sequence] = []
        begun: list[tuple[DecodeRequest, FinishReason | None]] = []
        for child in list(parent.children):
            if child.request_id not in tokens:
                self._wait_alone(child, parent, now)
                continue
            self._advance(child, DecodeEvent.FORKED)
            sequence = self.samples.begin(child, parent, is_first=not begun)
            child.token_ids.append(tokens[child.request_id])
            finish = self._batcher.limits.finish_of(sequence)
            begun.append((child, finish))
            if finish is None:
                sequence.is_known = is_known
                child.sequence = sequence
                going.append(sequence)
        copies = self.samples.fork(parent, prompt, going)
        if going:
            self._batcher.add_samples(copies, going[0])
        if is_known:
            self._batcher.retire(tokens.keys() - {one.request_id for one in going})
        self._batcher.remove(prompt)
        for child, finish in begun:
            self.samples.leave(child)
            first = tokens[child.request_id]
            told = [logprobs[child.request_id]] if child.request_id in logprobs else []
            self.send_tokens(child, [first], told, finish, now)
        self._advance(parent, DecodeEvent.LAST_TOKEN)
        self._forget(parent)

    def split(self, parent: DecodeRequest) -> None:
        """WAITING -> FAILED, without an answer, of a prompt whose samples are met one by one, in
        rooms that follow each other: they wait each for itself."""
        for child in list(parent.children):
            self.samples.leave(child)
            if parent.bootstrap is not None:
                room = parent.bootstrap.room + child.sample_index
                child.bootstrap = msgspec.structs.replace(parent.bootstrap, room=room)
            self.queue.add(child)
        self._advance(parent, DecodeEvent.CANCELLED)
        self._forget(parent)

    def _wait_alone(self, child: DecodeRequest, parent: DecodeRequest, now: float) -> None:
        """No token was drawn for a sample: its prompt's other half knew of fewer."""
        self.samples.leave(child)
        child.requested_at = parent.requested_at
        child.waiting_since = now
        self.queue.add_again(child)

    def retry(
        self, request: DecodeRequest, now: float, *, is_attempt: bool, is_computed_here: bool
    ) -> None:
        """TRANSFERRING -> WAITING: the transfer brought nothing."""
        self._advance(request, DecodeEvent.PEER_FAILED)
        if is_attempt:
            self._note_attempt(request)
            self._counters["retried"] += 1
            request.is_computed_here = is_computed_here
        self._wait_again(request, now)

    def retract(self, request: DecodeRequest, now: float) -> None:
        """RUNNING -> WAITING: others need its pages."""
        self._advance(request, DecodeEvent.RETRACTED)
        request.is_computed_here = False
        request.failure_count = 0
        request.tried_links.clear()
        request.retraction_count += 1
        request.digests = self._account.cached.digests_of(request.digests, request.token_ids)
        self._counters["retracted"] += 1
        self._wait_again(request, now)

    def _wait_again(self, request: DecodeRequest, now: float) -> None:
        """Back to the queue, ahead of those that have not begun."""
        self._let_go(request)
        request.transfer = None
        request.sequence = None
        request.waiting_since = now
        self.queue.add_again(request)

    def finish(self, request: DecodeRequest) -> None:
        """RUNNING -> FINISHED: its last token is there. Its cache is kept for equal beginnings."""
        self._advance(request, DecodeEvent.LAST_TOKEN)
        if request.sequence is not None and request.has_client:
            self._ended.append((request, request.sequence))
        self._drop_sequence(request)
        self._forget(request)

    def take_ended(self) -> list[tuple[DecodeRequest, Sequence]]:
        """Those of clients that have had their last token here since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def fail(
        self, request: DecodeRequest, failure: Failure, now: float, *, is_moved: bool = False
    ) -> None:
        """Any state -> FAILED: one error is the answer. A prompt fails with all of its samples, and
        ends with the last of them. is_moved: another server goes on from what is computed."""
        if request.children:
            for child in list(request.children):
                self.fail(child, failure, now)
            return
        self.answers.send_failure(request, failure, now)
        self._rooms.leave(request, failure.message)
        self._advance(request, DecodeEvent.CANCELLED)
        if request.transfer is not None and request.transfer.owner is not None:
            self._transfers.incoming.abandon(request.transfer, failure.message)
        request.transfer = None
        self._let_go(request)
        if is_moved and request.sequence is not None:
            self._ended.append((request, request.sequence))
        self._drop_sequence(request)
        self._forget(request)
        parent = self.samples.leave(request)
        if parent is not None and not parent.children:
            self.fail(parent, failure, now)

    # ---- while they run --------------------------------------------------------------------------

    def note_chunk(
        self, request: DecodeRequest, logprobs: bytes, *, is_last: bool, now: float
    ) -> bool:
        """A chunk of its prompt is computed here. Whether that completes its first prefill."""
        is_first_time = request.first_token_at == 0.0
        if is_first_time and logprobs:
            request.prompt_logprobs.append(logprobs)
        if not is_last or not is_first_time:
            return False
        assert request.sequence is not None
        request.transfer_trace = TransferTrace(
            prefill_s=now - request.requested_at,
        )
        request.cached = CachedTokens(decode=request.sequence.cached_count)
        return True

    def send_tokens(
        self,
        request: DecodeRequest,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        finish: FinishReason | None,
        now: float,
    ) -> None:
        """New tokens to the client; the last one may end the request."""
        is_first = request.first_token_at == 0.0
        if is_first:
            request.first_token_at = now
        self.queue.share.charge(request.claim.client, len(token_ids), OUTPUT_TOKEN_COST)
        if finish is not None:
            self.finish(request)
        self.answers.send_tokens(request, token_ids, logprobs, finish, now, is_first=is_first)

    # ---- helpers ---------------------------------------------------------------------------------

    def _advance(self, request: DecodeRequest, event: DecodeEvent) -> None:
        request.state = next_decode_state(request.state, event)

    def _note_begun(self, request: DecodeRequest, match: Match, now: float) -> None:
        """match: what is here of it. What is computed again was not its client's wish."""
        if not request.requested_at:
            request.requested_at = now
            lacking = len(request.token_ids) - match.token_count
            self.queue.share.charge(request.claim.client, lacking)
            if not request.tested_link:
                self.drain_rate.note_begun(now)

    def _note_attempt(self, request: DecodeRequest) -> None:
        request.failure_count += 1
        request.tried_links.add(request.link)

    def _let_go(self, request: DecodeRequest) -> None:
        """What is here of its cache may be evicted, if it was kept: nothing else comes."""
        self.arriving.remove(request)
        self.samples.give_back(request)
        if request.held is not None:
            self._account.cached.let_go(request.held)
            request.held = None

    def _drop_sequence(self, request: DecodeRequest) -> None:
        if request.sequence is not None:
            self._batcher.remove(request.sequence)
            request.sequence = None

    def _forget(self, request: DecodeRequest) -> None:
        del self._requests[request.request_id]
        self.deadlines.forget(request.request_id)
        self.queue.discard(request)
