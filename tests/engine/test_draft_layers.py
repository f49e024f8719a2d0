"""Layers that predict one token more: rows and guesses as their published definition has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from common.engine.cache.kv_pool import KvPool
from common.engine.draft_loader import read_draft
from common.engine.forward_batch import ForwardBatch, SequenceChunk
from common.engine.loader import load_model, read_served_config
from common.engine.models.causal_lm import CausalLm
from common.engine.models.draft import HiddenTap
from common.engine.models.registry import cache_components
from common.engine.sequence_table import SequenceTable
from common.engine.speculation.draft_passes import DraftPasses
from common.engine.speculation.proposer import FollowedRows
from common.errors import ConfigError
from common.layout.cache_layout import ServerLayout
from common.speculative import SpeculativeAlgorithm
from tests.engine.drafts import Eagle3Twin, NextnTwin, add_nextn, write_eagle3
from tests.engine.tiny_checkpoints import random_prompt

PAGE_SIZE = 8
CHANCES = tuple(10.0 ** -(number / 2) for number in range(20))
"""From certainty to what a random head has of four tokens."""
PAGE_COUNT = 40
NEXTN_RECIPES = ("deepseek_v3", "deepseek_v32", "glm_dsa", "qwen3_next", "qwen3_5", "qwen3_5_moe")

NEXTN = SpeculativeAlgorithm.NEXTN

Directory = Callable[[str], Path]


def load(path: Path, head: Path | None = None) -> CausalLm:
    """head: of EAGLE-3; None for the layer in the checkpoint itself."""
    config = read_served_config(path, dtype="float32")
    algorithm = NEXTN if head is None else SpeculativeAlgorithm.EAGLE3
    draft_path = str(head or "")
    draft = read_draft(config, algorithm, draft_path)
    return load_model(path, dtype="float32", draft=draft, draft_path=draft_path)


class Sequences:
    """A model with its draft over a pool, and sequences that each have pages of their own."""

    def __init__(self, model: CausalLm) -> None:
        assert model.draft is not None
        config = model.draft.config
        layout = ServerLayout(
            components=cache_components(model.config, "auto", config),
            tp_size=1,
            stages=((0, config.model.layer_count),),
            page_size=PAGE_SIZE,
        )
        layout.check()
        self.model = model
        self.pool = KvPool.allocate(layout.rank(0, 0), [PAGE_COUNT] * len(layout.groups), "cpu")
        self.table = SequenceTable(self.pool.groups, torch.device("cpu"))
        self.passes = DraftPasses(model, model.draft, self.pool, self.table)
        self._tapped = config.tapped
        self._next_page = 1

    def add(self, tokens: list[int], token_max: int) -> int:
        slot = self.table.add(self._next_page, torch.tensor(tokens))
        for group, live in enumerate(self.pool.groups):
            pages = list(range(self._next_page, self._next_page + live.page_end(token_max)))
            self.table.grant(group, [(slot, 0, pages)])
        self._next_page += -(-token_max // PAGE_SIZE)
        return slot

    def _page_ids(self, slot: int) -> list[list[int]]:
        tables = zip(self.table.page_tables, self.pool.groups, strict=True)
        return [
            table[slot].tolist() if group.live.is_paged else [int(table[slot, 0])]
            for table, group in tables
        ]

    def run(self, parts: list[tuple[int, list[int], int, int]]) -> torch.Tensor:
        """One pass over rows start .. stop of each (slot, tokens, start, stop), with the draft
        behind; the draft's last states."""
        chunks = [
            SequenceChunk(
                tokens[start:stop],
                start,
                self._page_ids(slot),
            )
            for slot, tokens, start, stop in parts
        ]
        batch = ForwardBatch.build(chunks, groups=self.pool.groups, device="cpu")
        tap = HiddenTap(self._tapped)
        self.model.forward(batch, self.pool, tap=tap)
        firsts = np.cumsum([0, *(stop - start for _, _, start, stop in parts)])
        spans = [
            FollowedRows(slot, int(first), start, tokens[start + 1 : stop + 1])
            for first, (slot, tokens, start, stop) in zip(firsts[:-1], parts, strict=True)
        ]
        with torch.inference_mode():
            return self.passes.follow(tap.states, spans)


@pytest.fixture(scope="module")
def with_nextn(tiny_checkpoint: Directory, tmp_path_factory: pytest.TempPathFactory) -> Directory:
    built: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in built:
            built[name] = add_nextn(tiny_checkpoint(name), tmp_path_factory.mktemp(name))
        return built[name]

    return get


@pytest.mark.parametrize("recipe", NEXTN_RECIPES)
def test_rows_and_guesses_are_those_of_the_published_definition(
    recipe: str, with_nextn: Directory, tmp_path: Path
) -> None:
    path = with_nextn(recipe)
    check_against_twin(load(path), NextnTwin(path, tmp_path))


@pytest.mark.parametrize("recipe", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("vocab_size", [0, 100])
def test_an_eagle3_head_is_that_of_the_published_definition(
    recipe: str, vocab_size: int, tiny_checkpoint: Directory, tmp_path: Path
) -> None:
    path = tiny_checkpoint(recipe)
    head = write_eagle3(path, tmp_path, vocab_size=vocab_size)
    check_against_twin(load(path, head), Eagle3Twin(path, head))


def check_against_twin(model: CausalLm, twin: NextnTwin | Eagle3Twin) -> None:
    """Two prompts of different lengths, in chunks of both, and a different number of guesses."""
    sequences = Sequences(model)
    first, second = random_prompt(21, 1), random_prompt(34, 2)
    slots = [sequences.add(tokens, 48) for tokens in (first, second)]

    # Chunks of both, then what is left of each: the token behind every row is known.
    sequences.run([(slots[0], first, 0, 9), (slots[1], second, 0, 17)])
    states = sequences.run([(slots[0], first, 9, 20), (slots[1], second, 17, 33)])

    for tokens, state in zip((first, second), states, strict=True):
        expected = twin.rows(twin.read(tokens[:-1]), tokens[1:])[-1]
        assert torch.allclose(state, expected, rtol=1e-3, atol=1e-3)
    lengths: set[int] = set()
    with torch.inference_mode():
        guesses = sequences.passes.guess(np.array(slots), [4, 2], states)
        assert guesses == [twin.guess(first, 4), twin.guess(second, 2)]
        for chance_min in CHANCES:
            likely = sequences.passes.guess(np.array(slots), [4, 2], states, chance_min)
            expected = [twin.guess(first, 4, chance_min), twin.guess(second, 2, chance_min)]
            assert likely == expected, chance_min
            lengths.add(len(likely[0]))
    assert len(lengths) > 2


def test_a_checkpoint_without_the_layer_is_refused_by_name(
    tiny_checkpoint: Directory,
) -> None:
    config = read_served_config(tiny_checkpoint("deepseek_v3"))
    with pytest.raises(ConfigError, match="num_nextn_predict_layers is 0"):
        read_draft(replace(config, extra_layer_count=0), NEXTN)
    with pytest.raises(ConfigError, match="LlamaForCausalLM is not served with layers"):
        read_draft(read_served_config(tiny_checkpoint("llama")), NEXTN)
    qwen = tiny_checkpoint("qwen3_5")
    with pytest.raises(ConfigError, match=r"lacks \d+ tensors: model\.layers\.4\."):
        load(qwen)


def test_without_a_draft_the_layer_is_left_out(with_nextn: Directory) -> None:
    for recipe in ("deepseek_v3", "qwen3_next"):
        model = load_model(with_nextn(recipe))
        assert model.draft is None
        names = {piece.name for weight in model.weights() for piece in weight.ways[0]}
        assert not any(name.startswith(("mtp.", "model.layers.4.")) for name in names)
