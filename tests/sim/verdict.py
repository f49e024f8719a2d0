"""How a story ends, and what must be true then: all are answered and right, and nothing is left."""

from __future__ import annotations

from decode_server.scheduler import DecodeScheduler
from tests.sim.client import Client
from tests.sim.invariants import forgotten_transfers
from tests.sim.node import Node
from tests.sim.promises import check_rooms
from tests.sim.world import GRACE_S, TICK_S, World

# How long a story goes on in which nothing is left to happen.
REST_S = 1.0
# How long a word about a transfer may be on its way when nothing goes wrong.
FORGOTTEN_MAX_S = 2.0
# A self-test may be under way at any moment.
SELF_TEST_MAX_S = 1.0
END_AT = 75.0  # later than any deadline and grace


def run_to_rest(world: World) -> None:
    """Until all that was planned has happened, everybody is answered and every page is back. Who is
    never at rest goes on past every deadline and grace."""
    world.run(world.last_due_at + TICK_S / 2)  # self-tests begin with a tick
    rest_s = 0.0
    waiting_since: dict[int, float] = {}
    while rest_s < REST_S and world.now < (END_AT if rest_s else END_AT + SELF_TEST_MAX_S):
        world.run(world.now + TICK_S)
        rest_s = rest_s + TICK_S if _is_at_rest(world) else 0.0
        _look_for_forgotten(world, waiting_since)


def _look_for_forgotten(world: World, waiting_since: dict[int, float]) -> None:
    """A transfer that its writer does not know of waits in vain, unless a word is on its way."""
    cores = {node.facts.incarnation: node.core for node in world.nodes.values()}
    in_vain: set[int] = set()
    for core in cores.values():
        if isinstance(core, DecodeScheduler):
            in_vain |= forgotten_transfers(core, cores)
    for transfer_id in list(waiting_since):
        if transfer_id not in in_vain:
            del waiting_since[transfer_id]
    for transfer_id in in_vain:
        waited_s = world.now - waiting_since.setdefault(transfer_id, world.now)
        assert waited_s < FORGOTTEN_MAX_S, f"transfer_id={transfer_id} waits for nobody"


def _is_at_rest(world: World) -> bool:
    return all(client.finals for client in world.clients.values()) and all(
        node.core.is_idle and node.core.account.pool.used_count(group) == _kept(node, group)
        for node in world.nodes.values()
        for group in range(len(node.core.account.pool.page_counts))
    )


def _kept(node: Node, group: int) -> int:
    """Pages that nobody has and that hold prefixes."""
    cache = node.core.account.cache
    return cache.evictable_count(group) if cache is not None else 0


def check_cached(world: World, client: Client) -> None:
    """No more of a prompt is cached than others under its salt have begun with. Where its own cache
    was asked for twice, or taken away again, it may be found because it was computed before; and of
    one that moved its output as well."""
    if not client.cached_count or client.is_moved:
        return
    assert client.cached_count <= len(client.prompt), "more is cached than the prompt has"
    others = [
        other
        for other in world.clients.values()
        if other.seed == client.seed
        and other is not client
        and other.submitted_at < client.answered_at
    ]
    known = max((_common(client.prompt, [*o.prompt, *o.output]) for o in others), default=0)
    if client.asked_count <= 1 and client.retraction_count == 0:
        assert client.cached_count <= known, (
            f"request {client.request_id}: {client.cached_count} tokens are cached of {known}"
        )


def _common(ours: list[int], theirs: list[int]) -> int:
    count = 0
    for our, their in zip(ours, theirs, strict=False):
        if our != their:
            break
        count += 1
    return count


def judge(world: World) -> None:
    """Every request one final reply, right tokens, nothing left anywhere."""
    for client in world.clients.values():
        assert len(client.finals) == 1, f"request {client.request_id}: {client.finals}"
        node = world.nodes[client.node]
        is_finished = client.finals[0] == "finished"
        count = client.max_new_tokens if is_finished else len(client.output)
        if client.role == "prefill":
            count = min(1, count)
        expected = client.expected(world.lives, count)
        due_at = max(client.submitted_at + client.budget_s, node.thawed_at) + GRACE_S
        assert client.answered_at <= due_at, (
            f"request {client.request_id}: answered {client.answered_at - due_at:.1f} s late"
        )
        assert client.output == expected[: len(client.output)], (
            f"request {client.request_id} on {client.node}: wrong tokens"
        )
        check_cached(world, client)
        if is_finished:
            assert client.output == expected, f"request {client.request_id}: incomplete"
    check_rooms(world)
    for node in world.nodes.values():
        assert not node.given_up, f"{node.name} gave up: {node.given_up}"
        pool = node.core.account.pool
        assert node.core.is_idle, f"{node.name} still has requests"
        transfers = node.worker.transfers.transfers
        assert not transfers, f"{node.name}: workers still know the pages of {list(transfers)}"
        for group in range(len(pool.page_counts)):
            assert pool.quarantined_count(group) == 0, f"{node.name}: pages still in quarantine"
            assert pool.used_count(group) == _kept(node, group), f"{node.name}: pages lost"


def check_flush(world: World) -> None:
    """Nobody keeps a prefix any more, and all of them can be forgotten."""
    for node in world.nodes.values():
        account = node.core.account
        cache, pool = account.cache, account.pool
        if cache is not None:
            assert cache.tree.locked_block_count == 0, f"{node.name}: a prefix is locked for good"
            kept = [one for tree_node in cache.tree.nodes() for one in tree_node.checkpoints]
            assert not any(one.users for one in kept), f"{node.name}: a checkpoint is used for good"
        assert account.flush_cache(), f"{node.name}: prefixes are left after a flush"
        for group in range(len(pool.page_counts)):
            assert pool.used_count(group) == 0, f"{node.name}: pages lost in the prefix cache"
