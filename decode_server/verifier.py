"""Caches that are there, and are compared with what was sent before anyone reads them.

The prefill server's last word brings its digests; our workers make theirs; what differs is named.
A transfer stays the receiver's until then. Knows nothing of what becomes of its request.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config import Verify
from common.planner.digests import Difference, digested_planes, find_difference
from common.protocol.digests import Digest, Digested
from common.protocol.peer import TransferDone, TransferFailed
from common.scheduling.facts import ServerFacts
from common.scheduling.peers import Outbox
from decode_server.receiver import Receiver
from decode_server.request import Transfer


@dataclass(slots=True, eq=False)
class _Check:
    """One transfer. found: per rank of ours, the digests of what is there."""

    transfer: Transfer
    done: TransferDone
    found: dict[int, bytes] = field(default_factory=dict)


class Verifier:
    """Owner of every comparison that is under way."""

    def __init__(self, facts: ServerFacts, receiver: Receiver, outbox: Outbox) -> None:
        self._facts = facts
        self._receiver = receiver
        self._outbox = outbox
        self._checks: dict[int, _Check] = {}
        self.counters = dict.fromkeys(("verified", "mismatched"), 0.0)

    def begin(self, transfer: Transfer, done: TransferDone) -> bool:
        """Whether a transfer, whose last word this is, is looked through first."""
        if transfer.verify is Verify.OFF:
            return False
        if done.transfer_id in self._checks:  # said twice
            return True
        self._receiver.note_quiet(transfer)
        self._checks[done.transfer_id] = _Check(transfer, done)
        self._outbox.to_workers(
            Digest(
                transfer_id=done.transfer_id,
                layout=transfer.source_layout,
                is_source=False,
                token_count=transfer.token_count,
                pages=[(span.first_index, list(span.page_ids)) for span in transfer.spans],
                verify=transfer.verify,
            )
        )
        return True

    def apply_digested(self, message: Digested) -> tuple[str, TransferDone | TransferFailed] | None:
        """A transfer's link and last word once every rank has answered: the prefill server's own,
        or that it failed. None as well if nobody waits for it any more."""
        check = self._checks.get(message.transfer_id)
        if check is None:
            return None
        (check.found[message.rank],) = message.digests
        if len(check.found) < self._facts.rank_count:
            return None
        del self._checks[message.transfer_id]
        transfer = check.transfer
        if self._receiver.get(message.transfer_id) is not transfer:
            return None
        problem = self._compare(check)
        transfer.verify = Verify.OFF  # nothing is left to compare
        if problem is None:
            self.counters["verified"] += 1
            return transfer.link, check.done
        self._count_mismatch(problem)
        text = f"the cache from {transfer.link} is not what was sent: {problem}"
        self._outbox.report(f"transfer {transfer.transfer_id:x}: {text}", is_warning=True)
        # The other half has ended well and its room is used up: any server may try again.
        assert transfer.request is not None, "it would not be the receiver's any more"
        transfer.request.bootstrap = None
        failed = TransferFailed(
            transfer_id=transfer.transfer_id,
            peer_incarnation=self._facts.incarnation,
            kind="transfer_corrupted",
            message=text,
            status=500,
            is_retryable=True,
        )
        return transfer.link, failed

    def _count_mismatch(self, problem: Difference | str) -> None:
        """In all, and by component and layer; the pages are told once, to the log."""
        self.counters["mismatched"] += 1
        if isinstance(problem, Difference):
            name = f"mismatched in {problem.component} of layer {problem.layer}"
            self.counters[name] = self.counters.get(name, 0.0) + 1

    def _compare(self, check: _Check) -> Difference | str | None:
        transfer, sent = check.transfer, check.done.digests
        ranks = self._facts.layout.ranks
        if len(sent) != len(ranks):
            return f"digests of {len(sent)} ranks were sent: there are {len(ranks)}"
        for rank in ranks:
            planes = digested_planes(rank, transfer.verify, transfer.transfer_id)
            found = check.found[rank.index]
            problem = find_difference(rank, planes, transfer.token_count, sent[rank.index], found)
            if problem is not None:
                return problem
        return None
