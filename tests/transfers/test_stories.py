"""Stories of two servers of one role that lend each other caches while things break."""

from __future__ import annotations

import random

import pytest

from common.config import TransferMode, Verify
from common.layout.component import FULL, Live, LiveKind
from tests.sim.client import EOS
from tests.sim.oracle import next_token
from tests.sim.world import World
from tests.transfers.lending import LendingNode, lending_pair
from tests.transfers.test_one_role import check_lent, used_counts

MODES = (TransferMode.DIRECT, TransferMode.STAGED, TransferMode.AUTO)
TRANSPORTS = ("posix", "tcp", "rc_mlx5", "cuda_ipc", "cuda_ipc,tcp")
ASK_COUNT = 6
REST_S = 4.0
LENGTHS = (5, 16, 17, 24, 30, 32)  # some end with pages of both servers
PAGE_COUNT = 400  # more than all that is ever held


def ask_if_connected(
    rng: random.Random, borrower: LendingNode, lender: LendingNode, prompts: dict[int, list[int]]
) -> None:
    links = borrower.lending.transfers.links.connections
    source = links.of_incarnation(lender.facts.incarnation)
    room = rng.choice(list(prompts))
    if source is not None and source.is_source and room not in borrower.lending.wanted:
        tokens = prompts[room]
        count = borrower.border * rng.randint(0, len(tokens) // borrower.border)
        prefix = borrower.keep_prefix(count) if count else None
        borrower.lending.ask(lender.facts.incarnation, room, tokens, prefix)


def drawn_prompt(rng: random.Random, lives: tuple[Live, ...]) -> list[int]:
    """One whose answer does not end with its first token: it is held while it runs."""
    while True:
        prompt = [rng.randint(10, 900) for _ in range(rng.choice(LENGTHS))]
        if next_token(prompt, lives) != EOS:
            return prompt


def break_something(rng: random.Random, world: World, node: LendingNode) -> None:
    match rng.randrange(4):
        case 0:
            node.freeze()
            world.run(world.now + rng.uniform(0.05, 1.5))
            node.thaw()
        case 1:
            other = next(one for one in world.nodes.values() if one is not node)
            node.worker.transfers.break_off(other.facts.incarnation)
        case 2:
            for transfer in node.lending.transfers.incoming.under_way:
                node.lending.transfers.incoming.abandon(transfer, "not needed any more")
        case _:
            world.network.cut.add(frozenset(world.nodes))
            world.run(world.now + rng.uniform(0.05, 1.5))
            world.network.repair()


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("seed", range(15))
def test_every_cache_that_comes_is_right_and_every_page_comes_back(seed: int, role: str) -> None:
    rng = random.Random(seed)
    world = World(seed)
    world.lives = (FULL, Live(LiveKind.BLOCK, 4))
    world.transport = rng.choice(TRANSPORTS)
    world.is_honest = True
    pair = lending_pair(world, role)
    for node in pair:
        node.transfer_mode = rng.choice(MODES[1:])
        node.verify = rng.choice((Verify.OFF, Verify.FULL))
        node.page_counts = (PAGE_COUNT, PAGE_COUNT)
    world.begin()
    empty = [used_counts(node) for node in pair]
    prompts = [
        {room + 10 * side: drawn_prompt(rng, world.lives) for room in range(3)} for side in (1, 2)
    ]
    for node, held in zip(pair, prompts, strict=True):
        for room, prompt in held.items():
            node.hold(room, prompt)
        node.lending.early_stops = sorted(rng.randint(1, 30) for _ in range(rng.randrange(3)))
        node.worker.slow_step_rate = 1.0  # what a decode server runs is not to end meanwhile
    full = [used_counts(node) for node in pair]
    assert full != empty
    for _ in range(ASK_COUNT):
        side = rng.randrange(2)
        ask_if_connected(rng, pair[side], pair[1 - side], prompts[1 - side])
        world.run(world.now + rng.uniform(0.0, 0.03))
        if rng.random() < 0.4:
            break_something(rng, world, pair[rng.randrange(2)])
    world.run(world.now + REST_S)
    for node in pair:
        for transfer in node.lending.transfers.incoming.under_way:  # its request lost in a cut
            node.lending.transfers.incoming.abandon(transfer, "its time is up")
    world.run(world.now + REST_S)
    for node in pair:
        assert node.lending.transfers.incoming.under_way_count == 0, "a transfer never ended"
        assert node.lending.transfers.incoming.abandoned_count == 0, "a page never came back"
        assert not list(node.lending.transfers.outgoing)
        check_lent(world, node)
        assert not node.lending.arrived
        node.check()
        node.drop_prefixes()
        node.check()
