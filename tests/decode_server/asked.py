"""What a decode server asks for, in the order in which it does."""

from __future__ import annotations

from common.protocol.peer import TransferRequest
from common.scheduling.events import Effect, ToPeer
from tests.sim.node import Node
from tests.sim.world import World


def prompts_asked_for(world: World) -> list[int]:
    """The first token of every prompt that is asked for from now on."""
    asked: list[int] = []

    def note(node: Node, effect: Effect) -> None:
        if isinstance(effect, ToPeer) and isinstance(effect.message, TransferRequest):
            asked.append(effect.message.token_ids[0])

    world.watchers.append(note)
    return asked
