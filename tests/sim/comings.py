"""Prefill servers that a decode server wants for a while only, as its frontend tells it.

Whatever the story is, some servers are taken out of its list in the midst of transfers and put in
again some time later, by a file that says so at once, or by a name server whose silence ends
nothing that works.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial

from common.protocol.frontend import WantedPeer
from decode_server.scheduler import DecodeScheduler
from tests.sim.node import Node
from tests.sim.world import World

COMINGS_SHARE = 0.25
FIRST_AT, LAST_AT = 1.0, 9.5
# Shorter than requests wait for a server.
AWAY_S = (0.05, 4.0)
RUSH_COUNT = 5


def plan_comings(world: World, rng: random.Random, decodes: Iterable[Node]) -> None:
    if rng.random() >= COMINGS_SHARE:
        return
    for decode in decodes:
        for _ in range(rng.randint(1, 4)):
            at = rng.uniform(FIRST_AT, LAST_AT)
            chosen = [rng.choice(("wanted", "kept", "gone", "gone")) for _ in decode.links]
            peers = [
                WantedPeer(link, is_dialled=how == "wanted")
                for link, how in zip(decode.links, chosen, strict=True)
                if how != "gone"
            ]
            for _ in range(rng.randint(0, RUSH_COUNT)):
                prompt = [rng.randint(10, 900) for _ in range(rng.randint(20, 60))]
                world.after(at - rng.uniform(0.0, 0.1), partial(world.submit, decode, prompt, 8))
            world.after(at, partial(decode.want, peers))
            world.after(at + rng.uniform(*AWAY_S), decode.want_all)


def check_all_are_back(world: World) -> None:
    """Who is wanted again is connected again. Raises: AssertionError."""
    for node in world.nodes.values():
        if isinstance(node.core, DecodeScheduler) and node.wanted is not None:
            known = {one.link for one in node.core.transfers.links.connections.sources()}
            missing = sorted({*node.links} - known)
            assert not missing, f"{node.name} wants {missing} again, and has no connection"
