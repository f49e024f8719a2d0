"""What workers are told of the pages of a transfer: each page once, whatever the chunks."""

from __future__ import annotations

import msgspec
import pytest

from common.layout.component import FULL, Live, LiveKind
from common.protocol.codec import encode
from common.protocol.worker import Digest, SchedulerToWorker, Step
from common.scheduling.events import Effect, ToWorkers
from tests.sim.node import Node
from tests.sim.world import World

CHUNK_TOKENS = 24  # as simulated servers have it
PAGE_SIZE = 4
WINDOW = 9


def told(token_count: int, lives: tuple[Live, ...] = (FULL,)) -> list[SchedulerToWorker]:
    """What the prefill server's workers are told for one prompt, steps and digests aside."""
    world = World(seed=1)
    world.lives = lives
    for name, role in (("p0", "prefill"), ("d0", "decode")):
        node = world.add(name, role, PAGE_SIZE, 300)
        node.page_counts = (300,) * len(lives)
    world.nodes["d0"].links = ["p0:1"]
    world.begin()
    messages: list[SchedulerToWorker] = []

    def note(node: Node, effect: Effect) -> None:
        if node.name == "p0" and isinstance(effect, ToWorkers):
            messages.append(effect.message)

    world.watchers.append(note)
    client = world.submit(world.nodes["d0"], list(range(token_count)), 2)
    world.run(world.now + 5.0)
    assert client.finals == ["finished"]
    assert sum(isinstance(message, Step) for message in messages) >= token_count // CHUNK_TOKENS
    return [message for message in messages if not isinstance(message, Step | Digest)]


def page_id_count(messages: list[SchedulerToWorker]) -> int:
    """Page ids in all page lists of all messages."""
    lists = [
        value
        for message in messages
        for field, value in msgspec.structs.asdict(message).items()
        if field.endswith("pages")
    ]
    return sum(len(page_ids) for groups in lists for _, page_ids in groups)


@pytest.mark.parametrize("chunk_count", [1, 4, 16])
def test_every_page_of_a_transfer_is_named_once_on_either_side(chunk_count: int) -> None:
    token_count = chunk_count * CHUNK_TOKENS
    messages = told(token_count)
    assert page_id_count(messages) == 2 * token_count // PAGE_SIZE


def test_four_times_the_prompt_takes_four_times_the_bytes() -> None:
    short, long = (
        sum(len(encode(message)) for message in told(count * CHUNK_TOKENS)) for count in (4, 16)
    )
    assert long < 4.2 * short


def test_pages_of_a_window_are_named_with_the_last_chunk() -> None:
    """Until then they move along, and none of those that came before are named."""
    token_count = 8 * CHUNK_TOKENS
    messages = told(token_count, (FULL, Live(LiveKind.WINDOW, WINDOW)))
    of_prompt = token_count // PAGE_SIZE
    of_window = (WINDOW + PAGE_SIZE - 2) // PAGE_SIZE + 1
    of_last_chunk = CHUNK_TOKENS // PAGE_SIZE
    assert page_id_count(messages) <= 2 * of_prompt + 2 * of_window + of_last_chunk


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05])
def test_workers_forget_the_pages_of_a_transfer_that_is_given_up(
    world: World, after_s: float
) -> None:
    client = world.submit(world.nodes["d0"], list(range(7 * CHUNK_TOKENS)), 2)
    transfers = world.nodes["p0"].worker.transfers
    while not transfers.transfers:
        world.run(world.now + 0.0005)
    world.run(world.now + after_s)
    world.cancel(client)
    world.run(world.now + 2.0)
    assert world.nodes["p0"].core.is_idle and not transfers.transfers
