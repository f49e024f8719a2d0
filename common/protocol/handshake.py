"""Comparisons of the handshake, and checks of reservations. Pure; they return lists of differences.

Knows nothing of connections. Every difference names both values, so that the operator of either
side knows the setting to change. Values of a peer raise nothing here, except in
`announced_page_counts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from common.config import TransferMode, Verify
from common.errors import ProtocolError
from common.layout.cache_layout import PageGroup, RankLayout, ServerLayout
from common.layout.component import CacheComponent
from common.layout.conversion import why_not_convertible
from common.planner.pairing import TokenRange
from common.prefix_digests import DIGEST_TOKENS, digests_nbytes
from common.protocol.descriptor import RankDescriptor
from common.protocol.peer import TransferRequest
from common.request import SamplingParams, logprobs_nbytes
from common.request_bounds import PROMPT_LOGPROBS_NBYTES_MAX

SHOWN_LENGTH_MAX = 300  # of one value in a difference; a list of many layers is cut


def negotiate_version(ours: tuple[int, int], theirs: tuple[int, int]) -> int | None:
    """The newest protocol version in both (oldest, newest) ranges; None if there is none."""
    newest = min(ours[1], theirs[1])
    return newest if newest >= max(ours[0], theirs[0]) else None


def compare_versions(ours: tuple[int, int], theirs: tuple[int, int]) -> list[str]:
    """Empty if two (oldest, newest) ranges of protocol versions have one in common."""
    if negotiate_version(ours, theirs) is not None:
        return []
    return [f"protocol version: ours {ours[0]}..{ours[1]}, theirs {theirs[0]}..{theirs[1]}"]


def compare_fingerprints(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Every key of either side whose value is not the same on both."""
    return [
        difference
        for key in dict.fromkeys([*ours, *theirs])
        for difference in _compare(_show(key), ours.get(key), theirs.get(key))
    ]


def agree_transfer_mode(ours: TransferMode, theirs: TransferMode) -> TransferMode | None:
    """The transfer mode of a pair whose servers are configured so; None if the two exclude each
    other.

    `staged` on either side keeps the target's pages out of reach. `direct` on either side means
    that there are no staging buffers. The two exclude each other.
    """
    both = {ours, theirs}
    if both == {TransferMode.STAGED, TransferMode.DIRECT}:
        return None
    for strict in (TransferMode.STAGED, TransferMode.DIRECT):
        if strict in both:
            return strict
    return TransferMode.AUTO


def agree_verify(ours: Verify, theirs: Verify | None) -> Verify:
    """The share of a cache that is compared: that of the stricter side. None: a side that can't."""
    if theirs is None:
        return Verify.OFF
    return max(ours, theirs, key=list(Verify).index)


def compare_transfer_mode(ours: TransferMode, theirs: TransferMode) -> list[str]:
    """Empty if caches can travel between the two sides."""
    return [] if agree_transfer_mode(ours, theirs) else _compare("transfer mode", ours, theirs)


def compare_layouts(
    ours: ServerLayout, theirs: ServerLayout, transfer_mode: TransferMode = TransferMode.DIRECT
) -> list[str]:
    """Differences that keep pages of one cache from being written into the other; both passed
    `check`.

    Tensor and pipeline parallel sizes, page sizes and layer groups may differ: the planner maps
    them. The components must be the same, in the same order, which numbers the page groups. Their
    element types may differ where transfers may be staged and the conversion is known.
    """
    our_components, their_components = _by_name(ours.components), _by_name(theirs.components)
    differences = _compare("layer count", ours.stages[-1][1], theirs.stages[-1][1])
    if our_components.keys() == their_components.keys():
        differences += _compare("components", list(our_components), list(their_components))
    for name in dict.fromkeys([*our_components, *their_components]):
        our, their = our_components.get(name), their_components.get(name)
        if our is None or their is None:
            differences += _compare(
                f"component {_show(name)}",
                None if our is None else "cached",
                None if their is None else "cached",
            )
            continue
        for field, our_value, their_value in (
            ("layers", our.layers, their.layers),
            ("live rule", _show_live(our), _show_live(their)),
            ("shard", our.shard, their.shard),
            ("order", our.order, their.order),
        ):
            differences += _compare(f"component {_show(name)} {field}", our_value, their_value)
        differences += _compare_elements(f"component {_show(name)}", our, their, transfer_mode)
    return differences


def _compare_elements(
    name: str, our: CacheComponent, their: CacheComponent, transfer_mode: TransferMode
) -> list[str]:
    """Differences that keep elements of two components from being copied or converted."""
    if our.dtype == their.dtype:
        return _compare(f"{name} segments", _show_segments(our), _show_segments(their))
    reason = why_not_convertible(our, their)
    if reason is None and transfer_mode is not TransferMode.DIRECT:
        return []
    if reason is None:
        reason = "a direct transfer does not convert"
    shown = f"ours {_show(our.dtype)}, theirs {_show(their.dtype)} ({_show(reason)})"
    differences = [f"{name} dtype: {shown}"]
    if [(s.name, s.unit_count) for s in our.segments] != [
        (s.name, s.unit_count) for s in their.segments
    ]:
        differences += _compare(f"{name} segments", _show_segments(our), _show_segments(their))
    return differences


def expected_writers(source: ServerLayout, target: ServerLayout) -> list[int]:
    """Global ranks of the prefill server that hold part of what the decode server caches.

    A transfer is complete only with the report of each. A rank whose part another replica writes
    reports too, without writing.
    """
    cached = {layer for component in target.components for layer in component.layers}
    return [rank.index for rank in source.ranks if not cached.isdisjoint(rank.layers)]


def announced_page_counts(layout: ServerLayout, ranks: Sequence[RankDescriptor]) -> tuple[int, ...]:
    """Pages per page group, without the scratch page, that every rank of a peer has room for.

    layout: the peer's. ranks: the descriptors that it announced.
    Raises: ProtocolError if a rank or a region is missing, one too many, or too small.
    """
    announced = sorted(descriptor.rank for descriptor in ranks)
    if announced != [rank.index for rank in layout.ranks]:
        raise ProtocolError(
            f"announced ranks {_show(announced)}: the layout has 0..{len(layout.ranks) - 1}, "
            f"each once"
        )
    counts: list[list[int]] = [[] for _ in layout.groups]
    for descriptor in ranks:
        _count_pages(layout.ranks[descriptor.rank], descriptor, counts)
    return tuple(min(of_ranks, default=0) for of_ranks in counts)


def check_transfer_request(
    source: ServerLayout,
    target: ServerLayout,
    page_counts: Sequence[int],
    request: TransferRequest,
    digest_tokens: int = DIGEST_TOKENS,
    digest_lookahead: int = 0,
) -> str | None:
    """The first fault of a reservation; None if its pages can be planned for.

    source: our layout. target: the peer's. page_counts: pages per group that the peer announced.
    digest_tokens, digest_lookahead: of each digest of a prompt's beginnings.
    """
    if request.token_count < 1:
        return f"token_count={request.token_count}: must be at least 1"
    problem = _check_prefix(
        request, target, digests_nbytes(request.token_count, digest_tokens, digest_lookahead)
    )
    if problem is None and request.room is None:
        problem = _check_prompt(request)
    if problem is not None:
        return problem
    writers = expected_writers(source, target)
    if request.writers != writers:
        return f"writers={_show(request.writers)}: must be {_show(writers)}"
    if len(request.pages) != len(target.groups):
        return f"pages of {len(request.pages)} page groups: there are {len(target.groups)}"
    for index, (group, (first_index, page_ids), page_count) in enumerate(
        zip(target.groups, request.pages, page_counts, strict=True)
    ):
        tokens = TokenRange(request.token_start, request.token_count, is_final=True)
        problem = _check_pages(group, first_index, page_ids, page_count, tokens)
        if problem is not None:
            return f"pages of group {index}: {problem}"
    return None


# ---- helpers -------------------------------------------------------------------------------------


def _check_prefix(request: TransferRequest, target: ServerLayout, due: int) -> str | None:
    """What the target has already are whole pages of every group that grows. due: bytes of the
    prompt's digests."""
    start, count = request.token_start, request.token_count
    nbytes = len(request.prefix_digests)
    if nbytes not in (0, due):
        return f"prefix_digests of {nbytes} bytes: must be 0, or {due} for {count} tokens"
    if not 0 <= start <= count:
        return f"token_start={start}: must be in 0..{count}"
    growing = [i for i, group in enumerate(target.groups) if group.live.is_streamable]
    if start and not growing:
        return f"token_start={start}: must be 0 where no cache grows with every token"
    for index in growing:
        page_tokens = target.groups[index].page_tokens
        if start % page_tokens:
            return (
                f"token_start={start}: must be a multiple of {page_tokens}, the tokens of a page "
                f"of group {index}"
            )
    return None


def _check_prompt(request: TransferRequest) -> str | None:
    if request.is_held:
        return "is_held: must be false where no room is"
    if len(request.token_ids) != request.token_count:
        return f"{len(request.token_ids)} token ids for token_count={request.token_count}"
    if not 1 <= request.prompt_count <= request.token_count:
        return f"prompt_count={request.prompt_count}: must be in 1..{request.token_count}"
    if request.sampling is None:
        return "sampling: must be given where no room is"
    return _check_told(request.sampling, request.token_count)


def _check_told(sampling: SamplingParams, token_count: int) -> str | None:
    """The frontend is stricter; this guards our memory against a peer's values."""
    if sampling.logprob_start_len < 0:
        return None
    nbytes = logprobs_nbytes(sampling, max(0, token_count - sampling.logprob_start_len))
    if nbytes <= PROMPT_LOGPROBS_NBYTES_MAX:
        return None
    return (
        f"log-probabilities of {token_count} prompt tokens may take {nbytes} bytes: at most "
        f"{PROMPT_LOGPROBS_NBYTES_MAX} can be sent"
    )


def _check_pages(
    group: PageGroup, first_index: int, page_ids: list[int], page_count: int, tokens: TokenRange
) -> str | None:
    items = tokens.items(group.live)
    needed = group.page_indices(items)
    if group.live.is_streamable and not needed:
        first = items.start // group.page_items
        needed = range(first, first)
    # A window of one token is never live, and its page is reserved all the same.
    is_exact = group.live.is_streamable or bool(needed)
    if is_exact and (first_index, len(page_ids)) != (needed.start, len(needed)):
        behind = f" behind {tokens.start}" if tokens.start else ""
        return (
            f"{len(page_ids)} from index {first_index}; {tokens.stop} tokens{behind} need "
            f"{len(needed)} from index {needed.start}"
        )
    for page in page_ids:
        if not 1 <= page <= page_count:
            return f"page {page}: must be in 1..{page_count}"
    if len(set(page_ids)) != len(page_ids):
        page, _ = Counter(page_ids).most_common(1)[0]
        return f"page {page} is named twice"
    return None


def _count_pages(layout: RankLayout, descriptor: RankDescriptor, counts: list[list[int]]) -> None:
    """Append to `counts` how many pages of each group this rank's regions hold."""
    if not descriptor.regions and descriptor.staging_buffer is not None:
        _count_announced_pages(layout, descriptor, counts)
        return
    if len(descriptor.regions) != len(layout.groups):
        raise ProtocolError(
            f"rank {descriptor.rank} announced {len(descriptor.regions)} regions for "
            f"{len(layout.groups)} page groups"
        )
    for group, (name, _, nbytes, _), of_ranks in zip(
        layout.groups, descriptor.regions, counts, strict=True
    ):
        if group.page_nbytes == 0:  # this rank's layers have nothing of the group
            continue
        count = nbytes // group.page_nbytes - 1
        if count < 1:
            raise ProtocolError(
                f"rank {descriptor.rank} announced region {_show(name)} of {nbytes} bytes: must "
                f"hold the scratch page and one more, of {group.page_nbytes} bytes each"
            )
        of_ranks.append(count)


def _count_announced_pages(
    layout: RankLayout, descriptor: RankDescriptor, counts: list[list[int]]
) -> None:
    """Page counts of a rank that announces no regions: it scatters into its pages itself."""
    if len(descriptor.page_counts) != len(layout.groups):
        raise ProtocolError(
            f"rank {descriptor.rank} announced page counts of {len(descriptor.page_counts)} page "
            f"groups: there are {len(layout.groups)}"
        )
    for group, count, of_ranks in zip(layout.groups, descriptor.page_counts, counts, strict=True):
        if group.page_nbytes == 0:
            continue
        if count < 1:
            raise ProtocolError(
                f"rank {descriptor.rank} announced {count} pages: must be at least 1"
            )
        of_ranks.append(count)


def _by_name(components: Iterable[CacheComponent]) -> dict[str, CacheComponent]:
    """A name that several components bear, each for its layers, is numbered: k, k (2), ..."""
    named: dict[str, CacheComponent] = {}
    seen: Counter[str] = Counter()
    for component in components:
        seen[component.name] += 1
        count = seen[component.name]
        named[component.name if count == 1 else f"{component.name} ({count})"] = component
    return named


def _show_segments(component: CacheComponent) -> str:
    return ", ".join(
        f"{segment.name} of {segment.unit_count} x {segment.unit_nbytes} bytes"
        for segment in component.segments
    )


def _show_live(component: CacheComponent) -> str:
    live = component.live
    return f"{live.kind} (size {live.size}, back {live.back})"


def _compare(name: str, ours: object, theirs: object) -> list[str]:
    if ours == theirs:
        return []
    return [f"{name}: ours {_show(ours)}, theirs {_show(theirs)}"]


def _show(value: object) -> str:
    """A value of a peer as one line of bounded length."""
    text = "(none)" if value is None or value == "" else str(value)
    if not text.isprintable():
        text = ascii(text)
    return text if len(text) <= SHOWN_LENGTH_MAX else f"{text[:SHOWN_LENGTH_MAX]}..."
