"""Window layers between any layouts: right tokens, and only the window of them is transferred.

Pages of the two sides differ in size, so that the lists of window pages differ in length and first
index, and the window is wider than some pages and narrower than others. Three layers of four see 24
tokens; the first stage of a pipeline has no other.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path

import pytest
from msgspec import structs

from common.protocol.codec import decode_layout
from common.protocol.peer import TransferDone, TransferFailed
from tests.e2e.fleet import CHECKPOINT, Body, Fleet, Node, error_message, reply_of
from tests.e2e.raw_decode import RawDecode
from tests.engine.tiny_checkpoints import RECIPES, Reference, edit_config, random_prompt

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.soak]

WINDOW, OTHER_WINDOW = 24, 20
WINDOW_LAYERS, FULL_LAYERS = 3, 1
TOKEN_NBYTES = 2 * 2 * 16 * 4  # keys and values of 2 heads of 16, in float32
# Shorter than the window, one less, equal, just over, in the second chunk, many times as long.
LENGTHS = [1, 23, 24, 25, 70, 300]
OUTPUT_COUNT = 40  # more than a window, so that every page that was transferred is recycled
FLAGS = ("--dtype", "float32", "--tokenizer-path", str(CHECKPOINT), "--chunked-prefill-size", "64")
# Of decode servers: every source sends the whole of what another one has sent before.
WHOLE = (*FLAGS, "--disable-radix-cache")

PREFILLS = {
    "tp2 page8": ("--tp-size", "2", "--page-size", "8"),
    "pp2 page32": ("--pp-size", "2", "--page-size", "32", "--layer-group-count", "2"),
}
DECODES = {
    "tp1 page4": ("--page-size", "4"),
    "pp2 page64": ("--pp-size", "2", "--page-size", "64"),
}
PAIRS = list(product(PREFILLS, DECODES))


@dataclass
class Town:
    """All servers of the tables above, and the reference."""

    prefills: dict[str, Node]
    decodes: dict[str, Node]
    other_window: Node
    checkpoint: Path
    oracle: Reference
    rooms: count[int]


@pytest.fixture(scope="module")
def town(
    fleet: Fleet, tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Town:
    checkpoint = tiny_checkpoint("gemma3")
    assert RECIPES["gemma3"].changes["sliding_window"] == WINDOW
    fleet.model_path = checkpoint
    prefills = {
        name: fleet.prefill(*FLAGS, *flags, name=f"prefill {name}")
        for name, flags in PREFILLS.items()
    }
    # One address suffices: the others are dialled when a request names them.
    decodes = {
        name: fleet.decode([prefills["tp2 page8"]], *WHOLE, *flags, name=f"decode {name}")
        for name, flags in DECODES.items()
    }
    edited = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("edited") / "model"))
    edit_config(edited, sliding_window=OTHER_WINDOW)
    other = fleet.decode([prefills["tp2 page8"]], *FLAGS, name="other window", model=edited)
    for node in (*prefills.values(), *decodes.values()):
        node.wait_ready()
    other.wait_refused()
    return Town(prefills, decodes, other, checkpoint, Reference.load(checkpoint), count(1))


def body_of(prefill: Node, room: int, prompt: list[int]) -> Body:
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": OUTPUT_COUNT, "ignore_eos": True},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": room,
    }


@pytest.mark.parametrize(("prefill", "decode"), PAIRS, ids=[f"{p} to {d}" for p, d in PAIRS])
def test_tokens_equal_the_reference_and_only_the_window_moves(
    fleet: Fleet, town: Town, prefill: str, decode: str
) -> None:
    source, target = town.prefills[prefill], town.decodes[decode]
    for length in LENGTHS:
        prompt = random_prompt(length, seed=length)
        body = body_of(source, next(town.rooms), prompt)
        first_half = fleet.in_background(source, body)
        reply = reply_of(target.post("/generate", body))
        assert reply_of(first_half.result()).output_ids == reply.output_ids[:1]
        assert reply.output_ids == town.oracle.greedy(prompt, OUTPUT_COUNT), length
        rows = FULL_LAYERS * length + WINDOW_LAYERS * min(length, WINDOW - 1)
        assert reply.timeline.transfer.nbytes == rows * TOKEN_NBYTES


def test_long_and_short_prompts_beside_each_other_are_right(fleet: Fleet, town: Town) -> None:
    decode = town.decodes["tp1 page4"]
    prompts = [random_prompt(length, seed=200 + length) for length in (5, 130, 24, 200, 61, 90)]
    bodies: list[Body] = [
        {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True},
        }
        for prompt in prompts
    ]
    replies = [fleet.in_background(decode, body) for body in bodies]
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply_of(reply.result()).output_ids == town.oracle.greedy(prompt, 40)


def test_sides_that_disagree_about_the_length_are_refused(fleet: Fleet, town: Town) -> None:
    """A window of another length would lie at other positions."""
    prefill, decode = town.prefills["pp2 page32"], town.decodes["pp2 page64"]
    room = next(town.rooms)
    first_half = fleet.in_background(prefill, body_of(prefill, room, random_prompt(70, seed=1)))
    response = decode.post("/generate", body_of(prefill, room, random_prompt(71, seed=1)))
    assert response.status_code == 400
    assert "prompt of 70 tokens here, 71 on the decode server" in error_message(response)
    assert first_half.result().status_code == 400


def test_a_window_of_another_width_is_refused_on_both_sides_and_both_go_on(town: Town) -> None:
    prefill = town.prefills["tp2 page8"]
    (refused,) = town.other_window.refusals()
    details = [refused.detail, *(peer.detail for peer in prefill.refusals())]
    assert len(details) == 2
    for detail in details:
        assert f"window (size {WINDOW}, back 0)" in detail
        assert f"window (size {OTHER_WINDOW}, back 0)" in detail
    assert town.other_window.get("/ping").status_code == 200
    assert prefill.get("/health").status_code == 200


def test_a_forged_reservation_is_refused_and_an_honest_one_is_served(town: Town) -> None:
    prefill, prompt = town.prefills["pp2 page32"], random_prompt(300, seed=5)
    with RawDecode(prefill, town.checkpoint, WINDOW_LAYERS + FULL_LAYERS, page_size=16) as raw:
        source = decode_layout(raw.welcome.layout)
        honest = raw.reserve(100, source, prompt)
        full, (first, window) = honest.pages
        forgeries: list[tuple[dict[str, object], str]] = [
            ({"pages": [full, (first, window[:1])]}, "1 from index 17; 300 tokens need 2 from"),
            ({"pages": [full, (0, window)]}, "2 from index 0; 300 tokens need 2 from index 17"),
            ({"pages": [full, (first, [1, 64])]}, "group 1: page 64: must be in 1..63"),
            ({"token_count": 293, "token_ids": prompt[:293]}, "293 tokens need 3 from index 16"),
            ({"token_count": 301}, "300 token ids for token_count=301"),
        ]
        for transfer_id, (fields, complaint) in enumerate(forgeries, start=1):
            forged = {"transfer_id": transfer_id, "prompt_count": 1, **fields}
            raw.say(structs.replace(honest, **forged))
            failed = raw.wait_for(TransferFailed)
            assert (failed.transfer_id, failed.status) == (transfer_id, 400)
            assert (failed.kind, failed.is_retryable) == ("bad_reservation", False)
            assert complaint in failed.message
        raw.say(honest)
        done = raw.wait_for(TransferDone)
    assert [done.first_token] == town.oracle.greedy(prompt, 1)
    rows = FULL_LAYERS * 300 + WINDOW_LAYERS * (WINDOW - 1)
    assert done.trace.nbytes == rows * TOKEN_NBYTES


def test_page_groups_are_told_by_name_and_no_page_is_left(fleet: Fleet, town: Town) -> None:
    fleet.wait_at_rest()
    for node in (*town.prefills.values(), *town.decodes.values()):
        groups = node.info().page_groups
        assert [(group.name, group.token_nbytes) for group in groups] == [
            ("full", FULL_LAYERS * TOKEN_NBYTES),  # the first stage of two has none of it
            (f"window-{WINDOW}", WINDOW_LAYERS * TOKEN_NBYTES),
        ]
        metrics = node.get("/metrics").text
        assert 'group="full"' in metrics and f'group="window-{WINDOW}"' in metrics
