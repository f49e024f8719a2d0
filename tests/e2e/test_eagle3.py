"""A pair with an EAGLE-3 head of its own checkpoint: the demo model's tokens, guessed as well as by
a server alone, and counted where clients and operators look."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from demo.facts import make_question
from tests.e2e.fleet import CHECKPOINT, Body, Fleet, Node, error_message, reply_of
from tests.e2e.replies import Reply, accept_length
from tests.engine.tiny_checkpoints import Reference, edit_tensors

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

HEAD = CHECKPOINT.parent / "draft_checkpoint"
STEP_COUNT = 2
FLAGS = ("--dtype", "float32", "--context-length", "400", "--metrics-names", "both")
DRAFT = ("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", str(STEP_COUNT))
# Answers, and what the model goes on with. A head that has lost the facts guesses less of it.
FACT_COUNTS = (12, 14, 16, 18, 20, 22, 24)
OUTPUT_COUNT = 24
GREEDY: Body = {"temperature": 0, "max_new_tokens": OUTPUT_COUNT, "ignore_eos": True}
DRAWN: Body = {"temperature": 0.8, "top_p": 0.95, "max_new_tokens": 40, "sampling_seed": 5}
TOLERANCE = 0.05
COUNTED = "vllm:spec_decode_num_"


@dataclass
class House:
    """alone: with the head; other: a decode server with other weights in it. expected: without."""

    decode: Node
    alone: Node
    other: Node
    prompts: list[list[int]]
    expected: list[list[int]]


def draft(head: Path = HEAD) -> tuple[str, ...]:
    return (*DRAFT, "--speculative-draft-model-path", str(head))


@pytest.fixture(scope="module")
def house(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> House:
    other_head = tmp_path_factory.mktemp("heads") / "other"
    shutil.copytree(HEAD, other_head)
    edit_tensors(other_head, lambda tensors: tensors["norm.weight"].mul_(1.5))
    layout = ("--tp-size", "2", "--page-size", "16", "--chunked-prefill-size", "48")
    prefill = fleet.prefill(*FLAGS, *draft(), *layout)
    decode = fleet.decode([prefill], *FLAGS, *draft(), "--page-size", "8")
    alone = fleet.decode([], *FLAGS, *draft(), name="alone")
    other = fleet.decode([prefill], *FLAGS, *draft(other_head), name="other")
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    texts = [make_question(count, count).prompt for count in FACT_COUNTS]
    prompts = [tokenizer.encode(text).ids for text in texts]
    oracle = Reference.load(CHECKPOINT)
    expected = [oracle.greedy(prompt, OUTPUT_COUNT) for prompt in prompts]
    for node in (prefill, decode, alone):
        node.wait_ready()
    return House(decode, alone, other, prompts, expected)


def ask(fleet: Fleet, node: Node, house: House, sampling: Body) -> list[Reply]:
    """All at once."""
    bodies: list[Body] = [{"input_ids": one, "sampling_params": sampling} for one in house.prompts]
    return [reply_of(one.result()) for one in [fleet.in_background(node, b) for b in bodies]]


def test_a_pair_gives_the_model_s_tokens_and_accepts_as_much_as_a_server_alone(
    fleet: Fleet, house: House
) -> None:
    found = [ask(fleet, node, house, GREEDY) for node in (house.decode, house.alone)]
    for replies in found:
        assert [reply.output_ids for reply in replies] == house.expected
    assert all(reply.timeline.transfer.nbytes > 0 for reply in found[0] if reply.timeline)
    lengths = [accept_length(replies) for replies in found]
    assert lengths[0] == pytest.approx(lengths[1], rel=TOLERANCE)
    assert lengths[0] > 1.8


def test_drawn_tokens_are_those_of_a_server_alone(fleet: Fleet, house: House) -> None:
    found = [ask(fleet, node, house, DRAWN) for node in (house.decode, house.alone)]
    outputs = [[reply.output_ids for reply in replies] for replies in found]
    assert outputs[0] == outputs[1]


def series(node: Node, prefix: str) -> dict[str, float]:
    """Values of /metrics by the rest of their name, and by position where there is one."""
    found: dict[str, float] = {}
    for line in node.get("/metrics").text.splitlines():
        if line.startswith(prefix):
            name, _, labels = line.removeprefix(prefix).partition("{")
            position = labels.partition('position="')[2].partition('"')[0]
            found[f"{name} {position}".strip()] = float(line.rpartition(" ")[2])
    return found


def test_replies_and_metrics_say_the_same_of_what_was_accepted(fleet: Fleet, house: House) -> None:
    before = series(house.decode, COUNTED)
    metas = [reply.meta_info for reply in ask(fleet, house.decode, house, GREEDY)]
    after = series(house.decode, COUNTED)
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    accepted = sum(meta.spec_accept_token_num for meta in metas)
    assert grown["drafts_total"] == sum(meta.spec_verify_ct for meta in metas)
    assert grown["draft_tokens_total"] == sum(meta.spec_draft_token_num for meta in metas)
    assert grown["accepted_tokens_total"] == accepted
    places = [grown[f"accepted_tokens_per_pos_total {place}"] for place in range(STEP_COUNT)]
    assert sum(places) == accepted and places == sorted(places, reverse=True) and places[1] > 0
    for meta in metas:
        assert meta.completion_tokens == OUTPUT_COUNT
        assert meta.spec_accept_length == 1 + meta.spec_accept_token_num / meta.spec_verify_ct
        assert meta.spec_accept_rate == meta.spec_accept_token_num / meta.spec_draft_token_num
    shown, total = series(house.decode, "sglang:spec_accept_"), after["accepted_tokens_total"]
    assert shown["length"] == pytest.approx(1 + total / after["drafts_total"])
    assert shown["rate"] == pytest.approx(total / after["draft_tokens_total"])


def test_a_server_with_another_head_is_refused_and_told_so(house: House) -> None:
    house.other.wait_refused()
    (refused,) = house.other.refusals()
    ours, theirs = refused.detail.split(", theirs ")
    assert "draft: ours EAGLE3, layer 3, config " in ours
    of_config, weights = theirs.split(", weights ")
    assert of_config in ours and weights not in ours
    assert "draft" in error_message(house.other.get("/health"))
