"""Sessions of several turns over a pair that keeps prompts and answers, of four kinds of caches.

Every turn's prompt is the one before, its answer and something new. What is there of it is told, is
not computed and not sent again, and the answers are those of a server that keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec
import pytest

from tests.e2e.fleet import CHECKPOINT, Body, Fleet, Node, reply_of
from tests.e2e.replies import Reply
from tests.e2e.test_metrics_of_a_pair import scrape, total
from tests.e2e.two_step_proxy import TwoStepProxy
from tests.engine.tiny_checkpoints import random_prompt
from tests.families.cases import CASES, Case

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

FLAGS = ("--dtype", "float32", "--tokenizer-path", str(CHECKPOINT))
PREFILL = ("--page-size", "8", "--chunked-prefill-size", "64")
DECODE = ("--page-size", "32")
KINDS = {"plain": "llama", "windows": "gemma3", "slots": "qwen3_next", "blocks": "deepseek_v4"}
# The others start eight servers more.
USUAL_KINDS = ("windows", "blocks")
TURN_COUNT = 4
FIRST_COUNT, NEW_COUNT, OUTPUT_COUNT = 90, 13, 27
SEEDS = count(1)
"""Sessions that begin alike would find each other's prompts."""


@dataclass
class Town:
    """Servers of one checkpoint. auto, off: decode servers, by their --local-prefill. cold: one
    that computes all itself and keeps nothing."""

    case: Case
    prefill: Node
    auto: Node
    off: Node
    cold: Node
    fleet: Fleet

    @property
    def keeping(self) -> tuple[Node, Node, Node]:
        return (self.prefill, self.auto, self.off)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=() if kind in USUAL_KINDS else pytest.mark.soak) for kind in KINDS
    ],
)
def town(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_checkpoint: Callable[[str], Path],
) -> Iterator[Town]:
    recipe = KINDS[request.param]
    (case,) = [case for case in CASES if case.recipe == recipe]
    with Fleet(tmp_path_factory.mktemp("logs"), tiny_checkpoint(recipe)) as fleet:
        prefill = fleet.prefill(*FLAGS, *PREFILL, "--return-cache", "off")
        auto = fleet.decode([prefill], *FLAGS, *DECODE, name="auto")
        off = fleet.decode([prefill], *FLAGS, *DECODE, "--local-prefill", "off", name="off")
        cold = fleet.decode([], *FLAGS, "--disable-radix-cache", name="cold")
        fleet.wait_ready()
        yield Town(case, prefill, auto, off, cold, fleet)
        fleet.wait_at_rest()


def body_of(token_ids: list[int], **more: object) -> Body:
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT_COUNT, "ignore_eos": True}
    return {"input_ids": token_ids, "sampling_params": sampling, **more}


def first_prompt() -> list[int]:
    return random_prompt(FIRST_COUNT, seed=next(SEEDS))


def next_prompt(prompt: list[int], reply: Reply) -> list[int]:
    return [*prompt, *reply.output_ids, *random_prompt(NEW_COUNT, seed=len(prompt))]


def block_tokens(node: Node) -> int:
    found: int = node.get("/server_info").json()["prefix_cache"]["block_tokens"]
    return found


def whole_blocks(node: Node, token_count: int) -> int:
    each = block_tokens(node)
    return token_count // each * each


def spared(node: Node) -> tuple[float, float]:
    """Tokens, and bytes, that were not sent to a decode server because it had them."""
    samples = scrape(node)
    names = ("baton:transfer_tokens_spared_total", "baton:transfer_bytes_spared_total")
    tokens, nbytes = (total(samples, name) for name in names)
    return tokens, nbytes


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_turns_are_answered_as_by_a_server_that_keeps_nothing(town: Town, mode: str) -> None:
    node = {"auto": town.auto, "off": town.off}[mode]
    prompt, ended, asked = first_prompt(), 0, 0
    for index in range(TURN_COUNT):
        before = spared(node)
        reply = node.generate(body_of(prompt))
        assert reply.output_ids == town.cold.generate(body_of(prompt)).output_ids, index
        meta, here = reply.meta_info, reply.meta_info.cached_tokens_details
        assert meta.cached_tokens == max(here.prefill, here.decode)
        assert meta.cached_tokens <= meta.prompt_tokens == len(prompt)
        assert (meta.cached_tokens > 0) == (index > 0)
        if index:  # the last token of an answer is in no cache
            assert here.decode >= whole_blocks(node, ended - 1)
        if mode == "off":
            assert here.prefill == asked
            assert here.decode == (whole_blocks(node, ended - 1) if index else 0)
            moved = reply.timeline.transfer.nbytes
            assert moved == town.case.rest_nbytes(len(prompt), here.decode)
            tokens, nbytes = (now - then for now, then in zip(spared(node), before, strict=True))
            assert tokens == here.decode
            assert nbytes == town.case.rest_nbytes(len(prompt), 0) - moved
        asked, ended = len(prompt), len(prompt) + OUTPUT_COUNT
        prompt = next_prompt(prompt, reply)


def test_another_salt_finds_nothing(town: Town) -> None:
    prompt = first_prompt()
    for salt in (None, "one", "other"):
        salted: Body = {} if salt is None else {"cache_salt": salt}
        first = town.off.generate(body_of(prompt, **salted))
        again = town.off.generate(body_of(prompt, **salted))
        assert first.meta_info.cached_tokens == 0
        assert again.meta_info.cached_tokens >= whole_blocks(town.off, FIRST_COUNT)
        assert first.output_ids == again.output_ids


def test_nothing_is_found_after_a_flush(town: Town) -> None:
    prompt = first_prompt()
    town.off.generate(body_of(prompt))
    town.off.wait_at_rest()
    assert town.off.post("/flush_cache", {}).status_code == 200
    cached = town.off.generate(body_of(prompt)).meta_info.cached_tokens_details
    assert cached.decode == 0
    for node in town.keeping:
        node.wait_at_rest()
        assert node.post("/flush_cache", {}).status_code == 200
    assert town.off.generate(body_of(prompt)).meta_info.cached_tokens == 0


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: PromptDetails


class Completion(msgspec.Struct):
    usage: Usage


def completion_of(prompt: list[int], **more: object) -> Body:
    asked: Body = {"model": "default", "prompt": prompt, "temperature": 0, "ignore_eos": True}
    return asked | {"max_tokens": OUTPUT_COUNT, "return_token_ids": True} | more


def test_openais_usage_tells_what_was_cached(town: Town) -> None:
    body = completion_of(first_prompt())
    usages = []
    for _ in range(2):
        response = town.off.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        usages.append(msgspec.json.decode(response.content, type=Completion).usage)
    assert [usage.prompt_tokens for usage in usages] == [FIRST_COUNT] * 2
    counts = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    assert counts[0] == 0
    assert whole_blocks(town.off, FIRST_COUNT) <= counts[1] <= FIRST_COUNT


def test_a_routed_session_moves_what_is_new(town: Town) -> None:
    prompt, ended = first_prompt(), 0
    for index in range(3):
        room: Body = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": town.prefill.bootstrap_port,
            "bootstrap_room": 1000 * next(SEEDS),
        }
        body = body_of(prompt, **room)
        halves = [town.fleet.in_background(node, body) for node in (town.prefill, town.auto)]
        prefilled, reply = (reply_of(half.result()) for half in halves)
        assert reply.output_ids == town.cold.generate(body_of(prompt)).output_ids, index
        assert prefilled.output_ids == reply.output_ids[:1]
        here = reply.meta_info.cached_tokens_details
        assert here.decode == (whole_blocks(town.auto, ended - 1) if index else 0)
        moved = reply.timeline.transfer.nbytes
        assert moved == town.case.rest_nbytes(len(prompt), here.decode)
        ended = len(prompt) + OUTPUT_COUNT
        prompt = next_prompt(prompt, reply)


class Choice(msgspec.Struct):
    token_ids: list[int]


class TokenCompletion(msgspec.Struct):
    choices: list[Choice]


def test_a_session_that_asks_the_prefill_server_first_moves_what_is_new(town: Town) -> None:
    proxy = TwoStepProxy(town.prefill, town.auto, town.fleet.client)
    prompt, ended = first_prompt(), 0
    for index in range(3):
        before = spared(town.auto)[0]
        lost = town.auto.info().counters["holds_lost"]
        response = proxy.post("/v1/completions", completion_of(prompt))
        assert response.status_code == 200, response.text
        (choice,) = msgspec.json.decode(response.content, type=TokenCompletion).choices
        expected = town.cold.generate(body_of(prompt)).output_ids
        assert choice.token_ids == expected, index
        assert town.auto.info().counters["holds_lost"] == lost
        wanted = whole_blocks(town.auto, ended - 1) if index else 0
        assert spared(town.auto)[0] - before == wanted
        ended = len(prompt) + OUTPUT_COUNT
        prompt = [*prompt, *expected, *random_prompt(NEW_COUNT, seed=len(prompt))]
