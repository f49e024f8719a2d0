"""Who has each page of a story: everything that is used has one owner, and nobody two. What lies in
those that are found is what their tokens leave behind.

Knows nothing of how it came to that.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from common.prefix_digests import DIGEST_NBYTES
from common.scheduling.prefix_cache import PrefixCache
from common.scheduling.prefix_tree import Checkpoint, Node
from tests.scheduling.prefix_memory import KnownSequence
from tests.scheduling.prefix_setup import first_name

if TYPE_CHECKING:
    from tests.scheduling.prefix_world import World


def check_owners(world: World) -> None:
    """Raises: AssertionError naming a page that is lost, owned twice, or free and owned."""
    account, cache = world.account, world.account.cache
    assert cache is not None
    account.pool.check()
    owned: list[Counter[int]] = [Counter() for _ in world.page_counts]
    readers = [one.node for one in account.sequences if one.node is not None]
    readers += [one.copied_node for one in account.sequences if one.copied_node is not None]
    readers += [one.held.node for one in world.arriving if one.held is not None]
    for sequence in account.sequences:
        for pages, own in zip(owned, account.owned_pages(sequence), strict=True):
            pages.update(own)
        assert sequence.cached_count <= len(sequence.token_ids)
        assert sequence.block_count * cache.block_tokens <= len(sequence.token_ids)
    for one in world.arriving:
        blocks = one.held.block_count if one.held is not None else 0
        for pages, span, each in zip(owned, one.spans, cache.page_counts, strict=True):
            pages.update(span.page_ids[blocks * each :])
    nodes = all_nodes(cache, readers)
    for node in nodes:
        for pages, of_node in zip(growing(cache, owned), node.pages, strict=True):
            pages.update(of_node)
    for checkpoint in all_checkpoints(world, cache, nodes):
        for pages, taken in zip(owned, checkpoint.pages, strict=True):
            pages.update(taken)
    for group, pages in enumerate(owned):
        twice = [page for page, count in pages.items() if count > 1]
        assert not twice, f"group {group}: pages {twice} are owned twice"
        used = account.pool._used[group]
        assert pages.keys() == used, (
            f"group {group}: {sorted(used - pages.keys())} are nobody's, "
            f"{sorted(pages.keys() - used)} are owned and not used"
        )
    check_locks(cache, nodes, readers)
    seen = (cache.version, world.may_find_bad)
    if world.seen != seen:
        world.seen = seen
        check_contents(world, cache)


def growing(cache: PrefixCache, owned: list[Counter[int]]) -> list[Counter[int]]:
    return [pages for pages, each in zip(owned, cache.page_counts, strict=True) if each]


def all_nodes(cache: PrefixCache, readers: list[Node]) -> list[Node]:
    """Those that are found, and those that were cut off and are not evicted yet."""
    nodes = set(cache.tree.nodes())
    for leaf in (*readers, *cache.tree._idle_leaves):
        nodes.update(one for one in leaf.path() if one.block_count)
    return list(nodes)


def all_checkpoints(world: World, cache: PrefixCache, nodes: list[Node]) -> set[Checkpoint]:
    """Those that are found, that are being copied, and that are being made."""
    found = {one for node in nodes for one in node.checkpoints}
    for one in found:
        assert one.node is not None and one in one.node.checkpoints
        assert one.node.start < one.block_count <= one.node.end or one.node.parent is None
    copied = Counter(
        one.checkpoint for one in world.account.sequences if one.checkpoint is not None
    )
    idle = set(cache.checkpoints.idle())
    for one in found | set(copied) | idle:
        assert one.users == copied[one]
        assert (one in idle) == (not one.users)
    made = {one for flight in world.batcher._in_flight._flights for _, one in flight.checkpoints}
    every = found | set(copied) | idle | made
    assert cache.checkpoints.count == len(every) <= cache.checkpoints.count_max
    for group, count in enumerate(cache.checkpoints.idle_page_counts):
        assert count == sum(len(one.pages[group]) for one in idle)
    return every


def check_locks(cache: PrefixCache, nodes: list[Node], readers: list[Node]) -> None:
    """A node is locked while a sequence or a cache on its way reads it, or what is below."""
    users = Counter(readers)
    locked = {one for reader in readers for one in reader.path()}
    for node in nodes:
        assert node.users == users[node], f"{users[node]} read a node, and it knows {node.users}"
        assert node.is_locked == (node in locked)
    tree = cache.tree
    assert tree.block_count == sum(node.block_count for node in nodes)
    assert tree.locked_block_count == sum(node.block_count for node in nodes if node.is_locked)
    assert tree.node_count == sum(node.block_count > 0 for node in nodes)
    for leaf in tree._idle_leaves:
        assert leaf.is_leaf and not leaf.is_locked
    times = [leaf.used_at for leaf in tree._idle_leaves]
    assert times == sorted(times)


def check_contents(world: World, cache: PrefixCache) -> None:
    """What is found holds what its tokens leave behind, and no token that is not computed yet."""
    for node in cache.tree.nodes():
        if node.block_count:
            salt, tokens = world.account.tokens[key_of(node, node.end - 1)]
            known = known_of(world, salt, tokens)
            pages = cache.pages(node, node.end)
            for of_group, known_pages in zip(pages, known.pages, strict=True):
                known_pages.update(enumerate(of_group))
            start = node.start * cache.block_tokens
            world.workers.memory.check_streamed(known, start, node.end * cache.block_tokens)
            assert not known.is_bad or world.may_find_bad, "what came out wrong is found"
        for checkpoint in node.checkpoints:
            check_checkpoint(world, cache, node, checkpoint)


def check_checkpoint(world: World, cache: PrefixCache, node: Node, checkpoint: Checkpoint) -> None:
    """Its pages hold what is live after its tokens, but for what its blocks have."""
    salt, tokens = node.seed, list[int]()
    if checkpoint.block_count:
        salt, tokens = world.account.tokens[key_of(node, checkpoint.block_count - 1)]
    count = checkpoint.token_count
    assert checkpoint.least_count in (count - 1, count)
    start = checkpoint.block_count * cache.block_tokens
    assert start + len(checkpoint.rest) in (count, count + cache.lookahead)
    known = known_of(world, salt, [*tokens[:start], *checkpoint.rest])
    for group, pages in enumerate(checkpoint.pages):
        page_group, each = world.layout.groups[group], cache.page_counts[group]
        first = (
            checkpoint.block_count * each if each else page_group.page_first(checkpoint.least_count)
        )
        known.pages[group].update(enumerate(pages, first))
    world.workers.memory.check_live(known, start, count, checkpoint.least_count)
    assert not known.is_bad or world.may_find_bad, "what came out wrong can be gone on from"


def key_of(node: Node, index: int) -> bytes:
    at = (index - node.start) * DIGEST_NBYTES
    return node.keys[at : at + DIGEST_NBYTES]


def known_of(world: World, salt: bytes, tokens: list[int]) -> KnownSequence:
    return KnownSequence(first_name(salt), tokens, len(world.page_counts), None)
