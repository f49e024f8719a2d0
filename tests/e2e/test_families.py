"""Every family between two real servers: right tokens, least bytes, no page left.

Layouts, page sizes and chunks differ between the servers. The same with ranks as threads, between
more layouts, is `tests/families` and runs every time, as slots do in `test_slots.py`; here
processes, UCX and the schedulers are real.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.fleet import CHECKPOINT, Body, Fleet, reply_of
from tests.engine.tiny_checkpoints import Reference, random_prompt
from tests.families.cases import CASES, Case

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.soak]

FLAGS = ("--dtype", "float32", "--tokenizer-path", str(CHECKPOINT))
PREFILL = ("--tp-size", "2", "--page-size", "8", "--chunked-prefill-size", "40")
DECODE = ("--pp-size", "2", "--page-size", "32")
# Layers that read the cache of one of another stage need a server without stages.
DECODE_OF = {"gemma4_e": ("--page-size", "32")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.recipe)
def test_a_pair_gives_the_tokens_of_the_reference_for_the_least_bytes(
    case: Case, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(case.recipe)
    prompts = [random_prompt(length, seed=length) for length in case.lengths]
    sampling: Body = {"temperature": 0, "max_new_tokens": case.output_count, "ignore_eos": True}
    with Fleet(tmp_path, checkpoint) as fleet:
        prefill = fleet.prefill(*FLAGS, *PREFILL)
        decode = fleet.decode([prefill], *FLAGS, *DECODE_OF.get(case.recipe, DECODE))
        oracle = Reference.load(checkpoint)
        expected = [oracle.greedy(prompt, case.output_count) for prompt in prompts]
        fleet.wait_ready()
        # All at once, so that prompts share chunks, and decodes share batches with prompts.
        pending = [
            fleet.in_background(decode, {"input_ids": prompt, "sampling_params": sampling})
            for prompt in prompts
        ]
        replies = [reply_of(future.result()) for future in pending]
        fleet.wait_at_rest()
    assert [reply.output_ids for reply in replies] == expected
    # The stages of the decode server share the layers, so no byte is needed twice.
    moved = [reply.timeline.transfer.nbytes for reply in replies]
    assert moved == [case.nbytes(length) for length in case.lengths]
