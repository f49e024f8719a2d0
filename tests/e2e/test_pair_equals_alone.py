"""The pair gives what one server gives, whatever the prompt's length, the sampling, the reply's
form and the transport; and one prefill server serves two decode servers at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import msgspec
import pytest

from common.frontend.bodies.sampling import derive_seed
from tests.e2e.fleet import CHECKPOINT, Body, Fleet, Node, reply_of
from tests.e2e.replies import Logprob, Reply
from tests.engine.tiny_checkpoints import Reference, random_prompt

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

PAGE_SIZE = 16
CHUNK_SIZE = 32
LENGTHS = [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, CHUNK_SIZE + 1, 3 * CHUNK_SIZE + 7]
OUTPUT_COUNT = 20
LOGPROB_TOLERANCE = 1e-4

GREEDY: Body = {"temperature": 0, "max_new_tokens": OUTPUT_COUNT, "ignore_eos": True}
SEEDED: Body = {
    "temperature": 0.9,
    "top_p": 0.95,
    "presence_penalty": 0.5,
    "seed": 7,
    "max_new_tokens": OUTPUT_COUNT,
    "ignore_eos": True,
}


@dataclass
class House:
    """One checkpoint served by one server, and by a pair over each transport."""

    alone: Node
    prefill: Node
    decodes: dict[str, Node]
    oracle: Reference


@pytest.fixture(scope="module")
def house(fleet: Fleet, tiny_checkpoint: Callable[[str], Path]) -> House:
    checkpoint = tiny_checkpoint("qwen3")
    fleet.model_path = checkpoint
    # The tiny checkpoint has no tokenizer of its own, and prompts are sent as token ids.
    flags = ("--dtype", "float32", "--tokenizer-path", str(CHECKPOINT))
    chunks = ("--chunked-prefill-size", str(CHUNK_SIZE))
    prefill = fleet.prefill(*flags, *chunks, "--page-size", str(PAGE_SIZE))
    # The same prompts come again and again, and every time all of their caches.
    every = (*flags, "--disable-radix-cache")
    decodes = {
        name: fleet.decode([prefill], *every, "--transport", name, name=f"decode-{name}")
        for name in ("shm", "stream")
    }
    alone = fleet.decode([], *flags, name="alone")
    fleet.wait_ready()
    return House(alone, prefill, decodes, Reference.load(checkpoint))


@pytest.fixture(params=["shm", "stream"])
def decode(request: pytest.FixtureRequest, house: House) -> Node:
    return house.decodes[str(request.param)]


def prompt(length: int) -> list[int]:
    return random_prompt(length, seed=length)


def body(length: int, sampling: Body, **more: object) -> Body:
    return {"input_ids": prompt(length), "sampling_params": sampling, **more}


@pytest.mark.parametrize("name", ["shm", "stream"])
def test_the_transport_that_was_asked_for_is_used(house: House, name: str) -> None:
    (peer,) = house.decodes[name].info().peers
    assert peer.transports == [{"shm": "posix", "stream": "stream"}[name]]


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_tokens_equal_one_servers(house: House, decode: Node, length: int) -> None:
    paired = decode.generate(body(length, GREEDY))
    assert paired.output_ids == house.oracle.greedy(prompt(length), OUTPUT_COUNT)
    assert paired.output_ids == house.alone.generate(body(length, GREEDY)).output_ids
    assert paired.timeline.transfer.nbytes > 0
    assert paired.finish.type == "length"


def test_every_chunk_of_a_long_prompt_leaves_on_its_own(house: House, decode: Node) -> None:
    house.prefill.post("/flush_cache", {})
    reply = decode.generate(body(LENGTHS[-1], GREEDY))
    assert reply.timeline.transfer.chunk_count == -(-LENGTHS[-1] // CHUNK_SIZE)


@pytest.mark.parametrize("length", LENGTHS)
def test_sampled_tokens_equal_one_servers(house: House, decode: Node, length: int) -> None:
    paired = decode.generate(body(length, SEEDED))
    assert paired.output_ids == house.alone.generate(body(length, SEEDED)).output_ids
    assert paired.output_ids != decode.generate(body(length, SEEDED | {"seed": 8})).output_ids


@pytest.mark.parametrize("length", LENGTHS)
def test_logprobs_of_prompt_and_output_equal_one_servers(
    house: House, decode: Node, length: int
) -> None:
    asked = body(length, GREEDY, return_logprob=True, logprob_start_len=0, top_logprobs_num=3)
    paired, alone = decode.generate(asked).meta_info, house.alone.generate(asked).meta_info
    assert len(paired.input_token_logprobs) == length
    assert len(paired.output_token_logprobs) == OUTPUT_COUNT
    assert_close(paired.input_token_logprobs, alone.input_token_logprobs)
    assert_close(paired.output_token_logprobs, alone.output_token_logprobs)
    assert len(paired.input_top_logprobs) == len(alone.input_top_logprobs) == length
    assert len(paired.output_top_logprobs) == len(alone.output_top_logprobs) == OUTPUT_COUNT
    for ours, theirs in chain(
        zip(paired.input_top_logprobs, alone.input_top_logprobs, strict=True),
        zip(paired.output_top_logprobs, alone.output_top_logprobs, strict=True),
    ):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert len(ours) == 3
            assert_close(ours, theirs)


def assert_close(ours: list[Logprob], theirs: list[Logprob]) -> None:
    assert [entry[1] for entry in ours] == [entry[1] for entry in theirs]
    for (value, token_id, _), (expected, _, _) in zip(ours, theirs, strict=True):
        if value is None or expected is None:
            assert value is expected, f"token {token_id}: {value}, {expected}"
        else:
            assert value == pytest.approx(expected, abs=LOGPROB_TOLERANCE)


def test_a_batch_equals_its_parts(house: House, decode: Node) -> None:
    batch: Body = {"input_ids": [prompt(n) for n in LENGTHS], "sampling_params": GREEDY}
    replies = decode.generate_list(batch)
    expected = [house.oracle.greedy(prompt(n), OUTPUT_COUNT) for n in LENGTHS]
    assert [reply.output_ids for reply in replies] == expected
    assert [reply.meta_info.prompt_tokens for reply in replies] == LENGTHS


SAMPLE_COUNT = 8
SAMPLED: dict[str, Body] = {
    "penalties": SEEDED | {"frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "ends that differ": SEEDED | {"stop_token_ids": list(range(0, 400, 3)), "min_new_tokens": 2},
    "one token": SEEDED | {"max_new_tokens": 1},
    "greedy": GREEDY,
}


@pytest.mark.parametrize("kind", SAMPLED)
def test_samples_equal_requests_of_their_seeds_and_move_one_cache(
    house: House, decode: Node, kind: str
) -> None:
    """Streamed and plain. The transfer's bytes are told with one of them."""
    told: Body = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    asked = body(CHUNK_SIZE + 9, SAMPLED[kind] | {"n": SAMPLE_COUNT}) | told
    seeds = [derive_seed(7, index) for index in range(SAMPLE_COUNT)]
    singles = [
        house.alone.generate(body(CHUNK_SIZE + 9, SAMPLED[kind] | {"seed": seed}) | told)
        for seed in seeds
    ]
    last: dict[int, Reply] = {}
    with decode.stream(asked) as events:
        for event in events:
            last[event.index] = event
    for replies in (decode.generate_list(asked), [last[i] for i in range(SAMPLE_COUNT)]):
        for reply, single in zip(replies, singles, strict=True):
            assert (reply.output_ids, reply.text) == (single.output_ids, single.text)
            assert reply.finish == single.finish
            ours, theirs = reply.meta_info, single.meta_info
            assert_close(ours.output_token_logprobs, theirs.output_token_logprobs)
            assert_close(ours.input_token_logprobs, theirs.input_token_logprobs)
        alone = decode.generate(body(CHUNK_SIZE + 9, SAMPLED[kind]))
        moved = [reply.timeline.transfer.nbytes for reply in replies]
        assert sum(moved) == alone.timeline.transfer.nbytes > 0


def test_a_sample_that_is_aborted_leaves_the_others(house: House, decode: Node) -> None:
    long: Body = {"max_new_tokens": 120, "ignore_eos": True, "temperature": 0.9, "seed": 7, "n": 4}
    asked = body(CHUNK_SIZE, long) | {"rid": "aborted-alone"}
    plain = house.alone.generate_list(body(CHUNK_SIZE, long))
    last: dict[int, Reply] = {}
    with decode.stream(asked) as events:
        for event in events:
            if not last:
                reply = decode.post("/abort_request", {"rid": "aborted-alone_2"})
                assert reply.status_code == 200
            last[event.index] = event
    assert last[2].finish.type == "abort"
    assert [last[i].output_ids for i in (0, 1, 3)] == [plain[i].output_ids for i in (0, 1, 3)]


def test_a_stream_grows_to_the_plain_reply(decode: Node) -> None:
    asked = body(CHUNK_SIZE + 1, SEEDED)
    plain = decode.generate(asked)
    with decode.stream(asked) as events:
        seen = list(events)
    assert seen[-1].output_ids == plain.output_ids
    assert seen[-1].text == plain.text
    assert seen[-1].finish == plain.finish
    assert len(seen) > 1
    for before, after in pairwise(seen):
        assert before.meta_info.finish_reason is None
        assert after.output_ids[: len(before.output_ids)] == before.output_ids
        assert after.text.startswith(before.text)


def test_a_streamed_batch_grows_to_the_plain_replies(decode: Node) -> None:
    asked: Body = {"input_ids": [prompt(n) for n in LENGTHS], "sampling_params": GREEDY}
    last: dict[int, Reply] = {}
    with decode.stream(asked) as events:
        for event in events:
            last[event.index] = event
    plain = decode.generate_list(asked)
    assert [last[i].output_ids for i in range(len(LENGTHS))] == [r.output_ids for r in plain]


def test_one_prefill_server_serves_two_decode_servers_at_once(fleet: Fleet, house: House) -> None:
    asked = [(node, n) for n in LENGTHS for node in house.decodes.values()]
    pending = [(n, fleet.in_background(node, body(n, GREEDY))) for node, n in asked]
    for length, future in pending:
        expected = house.oracle.greedy(prompt(length), OUTPUT_COUNT)
        assert reply_of(future.result()).output_ids == expected


def test_completions_of_openai_equal_generate(decode: Node) -> None:
    asked = body(PAGE_SIZE + 1, GREEDY)
    sent: Body = {"model": "default", "prompt": prompt(PAGE_SIZE + 1), "temperature": 0}
    sent |= {"max_tokens": OUTPUT_COUNT, "ignore_eos": True}
    response = decode.post("/v1/completions", sent)
    assert response.status_code == 200, response.text
    choices = msgspec.json.decode(response.content, type=Completion).choices
    assert [choice.text for choice in choices] == [decode.generate(asked).text]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_tokens_that_are_forbidden_are_drawn_on_neither_server(
    house: House, decode: Node, sampling: Body
) -> None:
    """The first token is the prefill server's, the others are the decode server's."""
    length = PAGE_SIZE + 1
    free = decode.generate(body(length, sampling)).output_ids
    pairs = [list(pair) for pair in pairwise(free)]
    rules: Body = {"bad_word_ids": [[free[0]], *pairs[1:]]}
    held = decode.generate(body(length, sampling | rules)).output_ids
    assert held == house.alone.generate(body(length, sampling | rules)).output_ids
    assert free[0] not in held
    assert not any(list(pair) in pairs[1:] for pair in pairwise(held))

    allowed = sorted({*free[5:], 7, 11})
    rules = {"allowed_token_ids": allowed}
    held = decode.generate(body(length, sampling | rules)).output_ids
    assert held == house.alone.generate(body(length, sampling | rules)).output_ids
    assert set(held) <= set(allowed) and held != free


def test_prompt_logprobs_of_vllm_are_those_of_generate(decode: Node) -> None:
    length = CHUNK_SIZE + 5
    asked = body(length, GREEDY, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
    meta = decode.generate(asked).meta_info
    sent: Body = {"prompt": prompt(length), "max_tokens": 1, "prompt_logprobs": 2}
    response = decode.post("/v1/completions", sent)
    assert response.status_code == 200, response.text
    (choice,) = msgspec.json.decode(response.content, type=Completion).choices
    told = choice.prompt_logprobs
    assert told is not None and len(told) == length and told[0] is None
    tops = zip(meta.input_token_logprobs, meta.input_top_logprobs, strict=True)
    for ranked, ((own, token_id, _), top) in zip(told, tops, strict=True):
        if ranked is None or top is None:
            assert ranked is top is own is None
            continue
        assert ranked.keys() == {str(token_id), *(str(one) for _, one, _ in top)}
        assert ranked[str(token_id)].logprob == pytest.approx(own, abs=LOGPROB_TOLERANCE)
        assert [ranked[str(one)].rank for _, one, _ in top] == [1, 2]
        is_likely = str(token_id) in [str(one) for _, one, _ in top]
        assert is_likely or (ranked[str(token_id)].rank or 0) > 2


class Ranked(msgspec.Struct):
    logprob: float
    rank: int | None


class Choice(msgspec.Struct):
    text: str
    finish_reason: str
    prompt_logprobs: list[dict[str, Ranked] | None] | None = None


class Completion(msgspec.Struct):
    choices: list[Choice]


def test_all_pages_come_back(fleet: Fleet, house: House) -> None:
    assert fleet.nodes == [house.prefill, *house.decodes.values(), house.alone]
    fleet.wait_at_rest()
