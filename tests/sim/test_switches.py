"""A prefill server that takes on the other role in the midst of transfers."""

from __future__ import annotations

import pytest

from tests.sim.leaving import drain_and_stop
from tests.sim.succession import hand_over
from tests.sim.test_fences import ON_ONE_HOST, PROMPT, pair, quarantined_count, run_into_transfers


@pytest.mark.parametrize("transport", ON_ONE_HOST)
def test_what_is_cut_off_by_a_switch_gives_its_pages_back(transport: str) -> None:
    """Nobody listens for the decode server's questions afterwards, and the workers live on, so
    nothing could prove later that they write no more."""
    world = pair(transport, is_one_host=True)
    prefill, decode = world.nodes["p0"], world.nodes["d0"]
    run_into_transfers(world)
    prefill.worker.slow_step_rate = 1.0  # so that all prompts take longer than they are waited for
    for index in range(8):
        world.submit(decode, [index, *PROMPT], 8)
    world.run(world.now + 0.2)

    def change() -> None:
        prefill.role = "decode"

    drain_and_stop(prefill, 0.0, lambda is_cut_off: hand_over(prefill, 0.1, change), settles=True)
    world.run(world.now + 4.0)
    assert prefill.role == "decode" and prefill.is_up
    assert decode.core.transfers.incoming.is_quiet
    assert quarantined_count(world) == 0
