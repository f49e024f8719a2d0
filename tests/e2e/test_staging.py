"""Pairs whose caches travel through staging slots: page sizes apart, and element types apart."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from demo.facts import make_question
from tests.e2e.fleet import Body, Fleet, Node, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

GREEDY: Body = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
FACT_COUNTS = (4, 16, 40, 60)
QUESTION_COUNT = 40
RECALL_MIN = 0.95


def questions(count: int, first_seed: int = 9000) -> list[tuple[str, str]]:
    """(prompt, answer)."""
    made = [make_question(first_seed + i, FACT_COUNTS[i % len(FACT_COUNTS)]) for i in range(count)]
    return [(question.prompt, question.answer) for question in made]


def transfers(node: Node) -> list[str]:
    return [
        note for peer in node.get("/server_info").json()["peers"] for note in peer["transfer_mode"]
    ]


FLAGS = ("--dtype", "float32", "--chunked-prefill-size", "64")
PAIRS = {
    "16-64": (("--page-size", "16"), ("--page-size", "64", "--transfer-mode", "staged")),
    "64-8": (
        ("--page-size", "64", "--transfer-mode", "staged"),
        ("--page-size", "8", "--transport", "stream"),
    ),
}


@dataclass
class Town:
    """Pairs by what their page sizes are, and one server that computes everything itself."""

    pairs: dict[str, tuple[Node, Node]]
    alone: Node


@pytest.fixture(scope="module")
def town(fleet: Fleet) -> Town:
    pairs: dict[str, tuple[Node, Node]] = {}
    for name, (prefill_flags, decode_flags) in PAIRS.items():
        prefill = fleet.prefill(
            *FLAGS, *prefill_flags, "--return-cache", "off", name=f"prefill {name}"
        )
        decode = fleet.decode([prefill], *FLAGS, *decode_flags, name=f"decode {name}")
        pairs[name] = (prefill, decode)
    alone = fleet.decode([], *FLAGS, name="alone")
    fleet.wait_ready()
    return Town(pairs, alone)


@pytest.mark.parametrize("name", PAIRS)
def test_staged_pages_of_another_size_give_what_one_server_gives(town: Town, name: str) -> None:
    prefill, decode = town.pairs[name]
    (note,) = transfers(prefill)
    assert note.startswith("staged (") and "us per put" in note
    assert transfers(decode) == ["staged"]
    for prompt, _ in questions(8):
        body: Body = {"text": prompt, "sampling_params": GREEDY}
        assert decode.generate(body).output_ids == town.alone.generate(body).output_ids
    for node in (prefill, decode):
        node.wait_at_rest()


@pytest.mark.parametrize("name", PAIRS)
def test_aborted_staged_transfers_give_every_page_back(fleet: Fleet, town: Town, name: str) -> None:
    prefill, decode = town.pairs[name]
    prompts = questions(8, first_seed=9100)
    for prompt, _ in prompts:
        reply = fleet.in_background(decode, {"text": prompt, "sampling_params": GREEDY})
        decode.post("/abort_request", {"abort_all": True})
        assert reply.result().status_code in (200, 499)
    for node in (prefill, decode):
        node.wait_at_rest()
    prompt, answer = prompts[0]
    assert decode.generate({"text": prompt, "sampling_params": GREEDY}).text.startswith(answer)


@pytest.mark.soak
def test_facts_are_recalled_from_a_cache_of_fp8(fleet: Fleet) -> None:
    """The tolerance of bfloat16 to float8_e4m3fn: at least 95 % of the answers are still right."""
    prefill = fleet.prefill("--dtype", "bfloat16")
    decode = fleet.decode([prefill], "--dtype", "bfloat16", "--kv-cache-dtype", "fp8_e4m3")
    for node in (prefill, decode):
        node.wait_ready()
    assert transfers(prefill)[0].startswith("staged (")
    right = 0
    for prompt, answer in questions(QUESTION_COUNT):
        sampling: Body = {"temperature": 0, "max_new_tokens": 8}
        right += decode.generate({"text": prompt, "sampling_params": sampling}).text == answer
    assert right >= RECALL_MIN * QUESTION_COUNT
    for node in (prefill, decode):
        node.wait_at_rest()


@pytest.mark.soak
def test_an_answer_goes_back_to_a_server_of_another_element_type(fleet: Fleet, town: Town) -> None:
    """What it narrows by the way changes few tokens."""
    flags = (*FLAGS, "--return-cache", "auto")
    prefill = fleet.prefill(*flags, "--kv-cache-dtype", "bfloat16", name="narrow")
    decodes = [fleet.decode([prefill], *flags, name=f"wide {i}") for i in range(2)]
    for node in (prefill, *decodes):
        node.wait_ready()
    right = 0
    for number, (prompt, _) in enumerate(questions(8, first_seed=9200), 1):
        told: list[int] = prefill.post("/tokenize", {"prompt": prompt}).json()["tokens"]
        first: Body = {"input_ids": told, "sampling_params": GREEDY | {"max_new_tokens": 40}}
        known = [*told, *decodes[0].generate(first).output_ids]
        prefill.wait_counted("returns_kept", number)
        second: Body = {"input_ids": [*known, *told], "sampling_params": GREEDY}
        other = decodes[1].generate(second)
        assert other.meta_info.cached_tokens_details.prefill == len(known) - 1
        right += other.output_ids == town.alone.generate(second).output_ids
    assert right >= 7
    for node in (prefill, *decodes):
        node.wait_at_rest()


@pytest.mark.soak
def test_a_direct_server_refuses_what_it_would_have_to_convert(fleet: Fleet) -> None:
    prefill = fleet.prefill("--dtype", "bfloat16", "--transfer-mode", "direct")
    decode = fleet.decode([prefill], "--dtype", "bfloat16", "--kv-cache-dtype", "fp8_e4m3")
    prefill.wait_ready()

    def refusals() -> list[str]:
        peers = decode.get("/server_info").json()["peers"]
        return [peer["detail"] for peer in peers if peer["state"] == "refused"]

    wait_until("the pair to be refused", lambda: bool(refusals()))
    assert "a direct transfer does not convert" in refusals()[0]
