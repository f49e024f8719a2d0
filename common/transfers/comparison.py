"""Caches that have come, compared with what was sent before anything reads them.

The sender's last message brings its digests, our workers make theirs, and the first difference is
named. Knows nothing of what becomes of a transfer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.planner.digests import Difference, digested_planes, find_difference
from common.protocol.digests import Digest, Digested
from common.protocol.peer import TransferDone
from common.scheduling.facts import ServerFacts
from common.scheduling.peers import Outbox
from common.transfers.incoming_transfer import IncomingTransfer


@dataclass(slots=True, eq=False)
class Comparison:
    """found: by rank of ours, the digests of what is there. problem: the first difference."""

    transfer: IncomingTransfer
    done: TransferDone
    found: dict[int, bytes] = field(default_factory=dict)
    problem: str = ""


class Comparisons:
    """Owner of every comparison that is under way."""

    def __init__(self, facts: ServerFacts, outbox: Outbox) -> None:
        self._facts = facts
        self._outbox = outbox
        self._comparisons: dict[int, Comparison] = {}
        self.counters = dict.fromkeys(("verified", "mismatched"), 0.0)

    def begin(self, transfer: IncomingTransfer, done: TransferDone) -> None:
        self._comparisons[done.transfer_id] = Comparison(transfer, done)
        self._outbox.to_workers(
            Digest(
                transfer_id=done.transfer_id,
                layout=transfer.source_layout,
                is_source=False,
                token_count=transfer.token_count,
                pages=transfer.pages,
                verify=transfer.verify,
                token_start=transfer.token_start,
            )
        )

    def forget(self, transfer_id: int) -> None:
        """The cache is of no use any more. Harmless if it is not compared."""
        self._comparisons.pop(transfer_id, None)

    def apply(self, message: Digested) -> Comparison | None:
        """A rank's digests; the comparison they complete, if they do."""
        comparison = self._comparisons.get(message.transfer_id)
        if comparison is None:
            return None
        (comparison.found[message.rank],) = message.digests
        if len(comparison.found) < self._facts.rank_count:
            return None
        del self._comparisons[message.transfer_id]
        difference = self._compare(comparison)
        self._count(difference)
        comparison.problem = "" if difference is None else str(difference)
        return comparison

    def _compare(self, comparison: Comparison) -> Difference | str | None:
        transfer, sent = comparison.transfer, comparison.done.digests
        ranks = self._facts.layout.ranks
        if len(sent) != len(ranks):
            return f"digests of {len(sent)} ranks were sent: there are {len(ranks)}"
        for rank in ranks:
            planes = digested_planes(rank, transfer.verify, transfer.transfer_id)
            found = comparison.found[rank.index]
            difference = find_difference(
                rank,
                planes,
                transfer.token_count,
                sent[rank.index],
                found,
                token_start=transfer.token_start,
            )
            if difference is not None:
                return difference
        return None

    def _count(self, difference: Difference | str | None) -> None:
        """In all, and by component and layer."""
        self.counters["verified" if difference is None else "mismatched"] += 1
        if isinstance(difference, Difference):
            name = f"mismatched in {difference.component} of layer {difference.layer}"
            self.counters[name] = self.counters.get(name, 0.0) + 1
