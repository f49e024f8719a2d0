"""One request as the workers see it: its tokens and the pages that hold their cache.

Knows nothing of HTTP or peers. Tokens and pages of a sequence, page size 4:

    tokens     a b c d | e f g h | i j            10 known
    computed   ------------------------           9: cache of tokens 0..8 is in pages
    pending                            ?          1: drawn by a step in flight, after token 9
    pages      [ 7 ]     [ 3 ]     [ 12 ]         logical page indices 0, 1, 2

Pages of a window group go once no later token can see into them, mostly by taking the next logical
index of their own sequence: with a window of 4, page 7 holds tokens 12..15 once token 9 is known.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field

from common.protocol.worker import NewSequence, PageCopies, PageGrant, SampleDraw
from common.request import SamplingParams
from common.scheduling.prefix_tree import Checkpoint, Node


@dataclass(slots=True)
class PageSpan:
    """Pages of one group at logical indices first_index, first_index + 1, ...

    granted_count: how many of them the workers have been told of.
    """

    first_index: int
    page_ids: list[int]
    granted_count: int = 0

    @property
    def end_index(self) -> int:
        return self.first_index + len(self.page_ids)

    def drop_before(self, index: int) -> list[int]:
        """Let go of the pages before a logical index; returns their ids."""
        count = max(0, min(index - self.first_index, len(self.page_ids)))
        dropped = self.page_ids[:count]
        del self.page_ids[:count]
        self.first_index += count
        self.granted_count = max(0, self.granted_count - count)
        return dropped

    def between(self, indices: range) -> list[int]:
        """The pages at some logical indices, which must be there."""
        assert self.first_index <= indices.start and indices.stop <= self.end_index, (self, indices)
        return self.page_ids[indices.start - self.first_index : indices.stop - self.first_index]


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, sampling and pages of one request on this server.

    digests: of its tokens' beginnings (see prefix_digests.py); none if it is not to be found by
    others, or they by it.
    computed_count: tokens whose cache is in the pages; cached_count of them came from the prefix
    cache.
    received_count: tokens whose cache came by a transfer, which brings of windows and tails what
    the next token needs and no more.
    node: of the prefix cache, kept for as long as the sequence lives, if it has one; block_count:
    blocks up to it, at the head of the groups that grow. Their pages belong to the cache, copies
    aside: those of blocks that another sequence was first with. added_from: the first block that
    this one put there.
    checkpoint: whose pages the first step copies; None once it has. copied_node: kept meanwhile, if
    that copies the last block as well. page_copies: for the next step.
    cuts: token counts at which checkpoints are to be made. making: of those that a step in flight
    makes. made: those that were, of what it computed.
    planned_count: tokens of the prompt up to the end of the last chunk that was sent.
    pending_count: tokens that steps in flight draw, not known yet.
    wanted_count: tokens of the prompt that another one waits for; 0 if none does.
    samples: for which its last chunk draws tokens instead of one for itself.
    first_proposals: tokens that may follow, guessed where its prompt was computed.
    priority: larger is more urgent: of its request, or of one that waits for what it computes.
    """

    request_id: int
    token_ids: list[int]
    prompt_count: int
    sampling: SamplingParams
    spans: list[PageSpan]
    digests: bytes = b""
    computed_count: int = 0
    cached_count: int = 0
    received_count: int = 0
    planned_count: int = 0
    pending_count: int = 0
    wanted_count: int = 0
    node: Node | None = None
    block_count: int = 0
    added_from: int | None = None
    copies: list[list[int]] = field(init=False)
    checkpoint: Checkpoint | None = None
    copied_node: Node | None = None
    page_copies: list[PageCopies] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    making: list[int] = field(default_factory=list)
    made: list[Checkpoint] = field(default_factory=list)
    samples: list[SampleDraw] = field(default_factory=list)
    first_proposals: list[int] = field(default_factory=list)
    is_known: bool = False
    priority: int = 0

    def __post_init__(self) -> None:
        self.copies = [[] for _ in self.spans]

    @property
    def output_count(self) -> int:
        return len(self.token_ids) - self.prompt_count

    @property
    def sample_count(self) -> int:
        """Sequences that decode once its prompt is computed."""
        return max(1, len(self.samples))

    @property
    def token_count(self) -> int:
        """Tokens that there are once every step in flight has returned."""
        return len(self.token_ids) + self.pending_count

    @property
    def chunk_start(self) -> int:
        """The first token of the prompt's next chunk."""
        return max(self.computed_count, self.planned_count)

    @property
    def left_count(self) -> int:
        """Tokens of the prompt that are in no chunk yet, or as far as another one waits for it."""
        start = self.chunk_start
        return (self.wanted_count if self.wanted_count > start else len(self.token_ids)) - start

    def introduce(self) -> NewSequence:
        """As workers are told of it."""
        proposals, self.first_proposals = self.first_proposals, []
        return NewSequence(
            self.request_id, list(self.token_ids), self.prompt_count, self.sampling, proposals
        )

    def take_grants(self) -> list[PageGrant]:
        """What the workers have not been told of the pages yet."""
        grants: list[PageGrant] = []
        for group, span in enumerate(self.spans):
            if span.granted_count < len(span.page_ids):
                grants.append(
                    PageGrant(
                        self.request_id,
                        group,
                        span.first_index + span.granted_count,
                        span.page_ids[span.granted_count :],
                    )
                )
                span.granted_count = len(span.page_ids)
        return grants

    def take_copies(self) -> list[PageCopies]:
        """What the next step copies before it computes."""
        copies, self.page_copies = self.page_copies, []
        return copies

    def page_lists(self) -> list[tuple[int, list[int]]]:
        """Per group (first logical index, page ids), as Send and TransferRequest carry them."""
        return [(span.first_index, list(span.page_ids)) for span in self.spans]


def reusable_count(token_ids: List[int], sampling: SamplingParams) -> int:
    """Tokens that a cached prefix may have at most. The last one is computed in any case."""
    count = len(token_ids) - 1
    if sampling.logprob_start_len >= 0:
        # The row before the first wanted token predicts it, so it has to be computed.
        count = min(count, max(0, sampling.logprob_start_len - 1))
    return count
