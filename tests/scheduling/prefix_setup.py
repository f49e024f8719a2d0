"""The requests of a story, and the server that it is about.

Knows nothing of what happens to them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as List
from dataclasses import dataclass

from common.layout.cache_layout import PageGroup, ServerLayout
from common.layout.component import FULL, SLOT, CacheComponent, Live, LiveKind, Segment, Shard
from common.prefix_digests import DIGEST_NBYTES, extend_digests
from common.protocol.worker import Step
from common.request import SamplingParams
from common.scheduling.cached_sequences import HeldPrefix
from common.scheduling.page_account import PageAccount
from common.scheduling.sequence import PageSpan, Sequence
from tests.scheduling.prefix_memory import next_name

TOKEN_MAX = 48
SALTS = (b"a" * DIGEST_NBYTES, b"b" * DIGEST_NBYTES)


def first_name(salt: bytes) -> int:
    """Of no token under a salt."""
    return next_name(7, SALTS.index(salt))


@dataclass(eq=False)
class Request:
    """tokens: with what was generated so far. bad_from: the first token that comes out wrong.

    writer, wanted: whom it waits for, and how many tokens. may_read_bad: whether one that comes out
    wrong was there when it began.
    """

    request_id: int
    salt: bytes
    tokens: list[int]
    prompt_count: int
    sampling: SamplingParams
    has_digests: bool
    bad_from: int | None = None
    writer: Sequence | None = None
    wanted: int = 0
    sequence: Sequence | None = None
    may_read_bad: bool = False


@dataclass(eq=False)
class Arriving:
    """A cache on its way: the pages of its request, behind the blocks that are held for it."""

    request: Request
    held: HeldPrefix | None
    spans: list[PageSpan]
    streamed_from: int
    digests: bytes


@dataclass(eq=False)
class Sent:
    """A step with the workers. drawn: what it drew, once it is computed; None for no token."""

    step: Step
    drawn: dict[int, int | None] | None = None


class WatchedAccount(PageAccount):
    """Knows who has not been closed, and which tokens a block of the cache stands for.

    sequences: that are open. tokens: by key, those of a block and all before it, and the next one
    where there is a draft.
    """

    def __init__(
        self,
        groups: List[PageGroup],
        page_counts: List[int],
        chunk_max: int,
        checkpoint_max: int,
        digest_tokens: int,
        lookahead: int = 0,
    ) -> None:
        super().__init__(
            groups,
            page_counts,
            has_prefix_cache=True,
            chunk_token_max=chunk_max,
            checkpoint_max=checkpoint_max,
            digest_tokens=digest_tokens,
            digest_lookahead=lookahead,
        )
        self.digest_tokens = digest_tokens
        self.lookahead = lookahead
        self.sequences: list[Sequence] = []
        self.tokens: dict[bytes, tuple[bytes, list[int]]] = {}

    def note_tokens(self, digests: bytes, tokens: List[int]) -> None:
        """What the keys of these digests stand for."""
        if self.cache is None or not digests:
            return
        digests = extend_digests(digests, tokens, self.digest_tokens, self.lookahead)
        salt, keys = self.cache.keys_of(digests)
        size = self.cache.block_tokens
        for index in range(len(keys) // DIGEST_NBYTES):
            key = keys[index * DIGEST_NBYTES : (index + 1) * DIGEST_NBYTES]
            self.tokens[key] = (salt, list(tokens[: (index + 1) * size + self.lookahead]))

    def close(self, sequence: Sequence) -> None:
        self.note_tokens(sequence.digests, sequence.token_ids)
        super().close(sequence)
        self.sequences.remove(sequence)


def random_layout(rng: random.Random, *, has_draft: bool = False) -> ServerLayout:
    """has_draft: of groups only whose checkpoints can all take their last token back."""
    kinds: list[Live] = [FULL] if has_draft else _random_kinds(rng)
    segment = (Segment("h", 1, 8),)
    components = tuple(
        CacheComponent(f"c{i}", (i,), segment, live, Shard.SPLIT, "float32")
        for i, live in enumerate(dict.fromkeys(kinds))
    )
    stages = ((0, len(components)),)
    return ServerLayout(components, 1, stages, rng.choice([1, 2, 4, 4, 8, 16]))


def _random_kinds(rng: random.Random) -> list[Live]:
    kinds: list[Live] = []
    if rng.random() < 0.8:
        kinds.append(FULL)
    if rng.random() < 0.4:
        size = rng.choice([3, 4, 16])
        kinds += [Live(LiveKind.BLOCK, size), Live(LiveKind.TAIL, size, rng.choice([0, size]))]
    if rng.random() < 0.4:
        kinds.append(Live(LiveKind.WINDOW, rng.randint(1, 20)))
    if rng.random() < 0.3:
        kinds.append(rng.choice([Live(LiveKind.TAIL, 4, 4), Live(LiveKind.TAIL, 5, 0)]))
    if rng.random() < 0.4 or not kinds:
        kinds.append(SLOT)
    rng.shuffle(kinds)
    return kinds


def own_pages(account: PageAccount, one: Arriving) -> list[list[int]]:
    """Per group, the pages of a cache on its way that nobody else has."""
    assert account.cache is not None
    blocks = one.held.block_count if one.held is not None else 0
    counts = account.cache.page_counts
    return [span.page_ids[blocks * n :] for span, n in zip(one.spans, counts, strict=True)]
