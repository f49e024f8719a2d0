"""A pair whose weights change under it: streams stand still and go on, what one version has
computed is never read by another one, and a checkpoint that can't be loaded changes nothing."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.e2e.fleet import CHECKPOINT, Body, Fleet, Node, error_message, reply_of, wait_until
from tests.engine.tiny_checkpoints import RECIPES, build_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

FLAGS = ("--dtype", "float32", "--tokenizer-path", str(CHECKPOINT))
PROMPTS = [random.Random(seed).choices(range(3, 90), k=30 + seed) for seed in range(4)]
LONG_COUNT = 200


def body(prompt: list[int], output_count: int = 12) -> Body:
    sampling = {"max_new_tokens": output_count, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling}


def ask(node: Node, output_count: int = 12) -> list[list[int]]:
    return [node.generate(body(prompt, output_count)).output_ids for prompt in PROMPTS]


@dataclass
class Town:
    """A pair that begins with checkpoint a, and a server alone that has b from its start."""

    prefill: Node
    decode: Node
    fresh_b: Node
    a: Path
    b: Path

    @property
    def pair(self) -> tuple[Node, Node]:
        return (self.prefill, self.decode)

    def update(self, node: Node, model: Path, version: str) -> None:
        fields: Body = {"model_path": str(model), "weight_version": version}
        reply = node.post("/update_weights_from_disk", fields)
        assert reply.status_code == 200 and reply.json()["success"] is True, reply.text

    def update_both(self, model: Path, version: str) -> None:
        for node in self.pair:
            self.update(node, model, version)
        self.decode.wait_ready()


@pytest.fixture(scope="module")
def town(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    recipe, models = RECIPES["llama"], tmp_path_factory.mktemp("models")
    a = build_checkpoint(recipe, models / "a")
    b = build_checkpoint(replace(recipe, seed=recipe.seed + 1), models / "b")
    prefill = fleet.prefill(*FLAGS, "--tp-size", "2", model=a)
    decode = fleet.decode([prefill], *FLAGS, model=a)
    fresh_b = fleet.decode([], *FLAGS, name="fresh", model=b)
    fleet.wait_ready()
    yield Town(prefill, decode, fresh_b, a, b)


def set_running(node: Node, path: str, mode: str = "") -> None:
    reply = node.post(path, {"mode": mode} if mode else {})
    assert reply.status_code == 200 and reply.json()["status"] == "ok", reply.text


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_streams_stand_still_and_go_on(town: Town, fleet: Fleet, mode: str) -> None:
    expected = [town.decode.generate(body(one, LONG_COUNT)).output_ids for one in PROMPTS[:2]]
    with town.decode.stream(body(PROMPTS[0], LONG_COUNT)) as events:
        next(events)
        for node in town.pair:
            set_running(node, "/pause_generation", mode)
        count = town.decode.info().step_count
        waiting = fleet.in_background(town.decode, body(PROMPTS[1], LONG_COUNT))
        town.decode.wait_queued("waiting", 1 + (mode == "retract"))
        assert town.decode.info().step_count == count
        assert town.decode.get("/health").json()["is_paused"] is True
        for node in town.pair:
            set_running(node, "/continue_generation")
        *_, last = events
    assert last.output_ids == expected[0]
    assert reply_of(waiting.result()).output_ids == expected[1]
    assert last.meta_info.num_retractions == (mode == "retract")


def test_an_abort_pause_answers_with_what_there_is(town: Town, fleet: Fleet) -> None:
    expected = town.decode.generate(body(PROMPTS[0], LONG_COUNT)).output_ids
    with town.decode.stream(body(PROMPTS[0], LONG_COUNT)) as events:
        next(events)
        set_running(town.decode, "/pause_generation")
        *_, last = events
    set_running(town.decode, "/continue_generation")
    assert last.meta_info.finish_reason is not None
    assert last.meta_info.finish_reason.type == "abort"
    assert 0 < len(last.output_ids) < LONG_COUNT
    assert last.output_ids == expected[: len(last.output_ids)]


def test_an_answer_that_spans_two_versions_says_which_made_what(town: Town) -> None:
    """Its first part is that of the old weights, and its rest what a server of the new ones makes
    of prompt and first part: nothing that the old ones have computed is read any more."""
    of_a, workers = ask(town.decode), town.decode.process_id_of("common.worker")
    with town.decode.stream(body(PROMPTS[0], LONG_COUNT)) as events:
        next(events)
        for node in town.pair:
            set_running(node, "/pause_generation", "in_place")
        for node in town.pair:
            town.update(node, town.b, "b")
            assert node.info().weight_version == "b"
            assert node.get("/health").status_code in (200, 503)
        for node in town.pair:
            set_running(node, "/continue_generation")
        *_, last = events
    (first, count), (second, rest) = last.meta_info.weight_versions
    assert (first, second, count + rest) == ("default", "b", LONG_COUNT)
    assert last.output_ids[: min(12, count)] == of_a[0][:count]
    made, prompt = last.output_ids, PROMPTS[0] + last.output_ids[:count]
    assert made[count:] == town.fresh_b.generate(body(prompt, rest)).output_ids
    of_b = ask(town.fresh_b)
    reply = town.decode.generate(body(PROMPTS[1]))
    assert reply.meta_info.cached_tokens == 0, "prefixes of the old weights are gone"
    assert reply.meta_info.weight_version == "b" and reply.meta_info.weight_versions == []
    assert ask(town.decode) == of_b != of_a
    assert town.decode.process_id_of("common.worker") == workers
    town.update_both(town.a, "a")
    assert ask(town.decode) == of_a


def test_a_pair_of_two_versions_is_refused_by_name_until_both_have_the_same(
    town: Town, fleet: Fleet
) -> None:
    """What the old weights have begun waits with all else, and is computed by the new ones from its
    first token on: it is in no cache of theirs."""
    of_a = ask(town.decode)
    with town.decode.stream(body(PROMPTS[0], LONG_COUNT)) as events:
        next(events)
        set_running(town.decode, "/pause_generation", "in_place")
        town.update(town.decode, town.b, "b")
        town.decode.wait_refused()
        (refused,) = town.decode.refusals()
        assert "weights" in refused.detail and "weight_version" in refused.detail
        assert town.decode.get("/health").status_code == 503
        waiting = fleet.in_background(town.decode, body(PROMPTS[2]))
        town.decode.wait_queued("waiting", 2)
        town.update(town.prefill, town.b, "b")
        set_running(town.decode, "/continue_generation")
        *_, last = events
    (first, count), (second, rest) = last.meta_info.weight_versions
    assert (first, second, count + rest) == ("a", "b", LONG_COUNT)
    made = town.fresh_b.generate(body(PROMPTS[0] + last.output_ids[:count], rest))
    assert last.output_ids[count:] == made.output_ids
    of_b = reply_of(waiting.result()).output_ids
    assert of_b == town.fresh_b.generate(body(PROMPTS[2])).output_ids != of_a[2]


def broken_checkpoints(town: Town, directory: Path) -> dict[str, Path]:
    """By what their refusal names."""
    made: dict[str, Path] = {}
    for name in ("cut short", "lacks", "vocab_size"):
        path = directory / name.replace(" ", "-")
        shutil.copytree(town.b, path)
        made[name] = path
    weights = made["cut short"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4096])
    config = made["vocab_size"] / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": ', '"vocab_size": 1'))
    header = made["lacks"] / "model.safetensors"
    header.write_bytes(header.read_bytes().replace(b"model.norm.weight", b"model.morn.weight"))
    return made


def test_a_checkpoint_that_can_t_be_loaded_leaves_the_old_weights_serving(
    town: Town, tmp_path: Path
) -> None:
    """Whichever of the ranks it fails on; streams don't even notice."""
    before, expected = town.prefill.info(), ask(town.decode)
    for named, path in broken_checkpoints(town, tmp_path).items():
        for node in town.pair:
            with town.decode.stream(body(PROMPTS[0], 40)) as events:
                fields: Body = {"model_path": str(path), "weight_version": "broken"}
                reply = node.post("/update_weights_from_disk", fields)
                assert reply.status_code == 400 and reply.json()["success"] is False
                assert named in reply.json()["message"] and named in error_message(reply)
                *_, last = events
            assert last.output_ids[:12] == expected[0]
    assert town.prefill.info().incarnation == before.incarnation
    assert town.prefill.info().weight_version == before.weight_version
    assert ask(town.decode) == expected


def test_the_same_weights_under_another_name_are_other_ones(town: Town) -> None:
    """So a pair is whole again only once both are told, whatever the files say."""
    expected = ask(town.decode)
    for node in town.pair:
        reply = node.post("/update_weight_version", {"new_version": "other"})
        assert reply.status_code == 200 and reply.json()["new_version"] == "other"
    town.decode.wait_ready()
    answer = town.decode.generate(body(PROMPTS[0]))
    assert answer.output_ids == expected[0] and answer.meta_info.weight_version == "other"


def test_the_servers_end_at_rest(town: Town) -> None:
    for node in town.pair:
        wait_until("nothing to be open", lambda node=node: node.info().is_at_rest)  # type: ignore[misc]
