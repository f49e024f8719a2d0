"""Launches of one step that decodes, by layer: the engine as it is, over tensors without content.

To ask such a tensor for a number is an error, so a count also shows that a step waits for nothing.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from common.clock import ManualClock
from common.engine.attention.attention import RecordableAttention
from common.engine.attention.choose import AttentionChoice
from common.engine.attention.flashinfer import FlashInferAttention
from common.engine.attention.flashinfer_latent import FlashInferLatentAttention
from common.engine.cache.kv_pool import DTYPES, KvPool
from common.engine.distributed import ParallelContext
from common.engine.graphs.decode_graphs import DecodeGraphs
from common.engine.layers.fused import FusedKernels, NormedRotation
from common.engine.layers.layer_context import LayerContext
from common.engine.loader import attention_shape, fused_shape, read_served_config
from common.engine.model_runner import ModelRunner
from common.engine.models.causal_lm import CausalLm, DecoderLayer
from common.engine.models.layer_pass import LayerPass
from common.engine.models.pre_norm_layer import PreNormLayer
from common.engine.models.registry import FAMILIES, cache_components
from common.layout.cache_layout import ServerLayout
from common.protocol.worker import NewSequence, PageGrant, Step
from common.request import SamplingParams
from tests.launches import kernels
from tests.launches.counter import DEVICE, LaunchCounter
from tests.launches.shapes import LAYER_COUNT, SHAPES

PAGE_SIZE = 16
TOKEN_COUNT = 100
BATCH_SIZES = (1, 2, 4, 8)
ROW_COUNT = 3
GREEDY = SamplingParams(max_new_tokens=64, seed=1, temperature=0.0)
DRAWN = SamplingParams(max_new_tokens=64, seed=1, temperature=0.8)

AROUND = "around the pass"
INSIDE = "in the pass"


@dataclass(frozen=True, slots=True)
class StepCount:
    """layers: of the last layer of each kind; the first may prepare something for the others.
    outside: of all else. names: of what is launched, by place."""

    layers: dict[str, int]
    outside: int
    names: dict[str, Counter[str]]


class _Recorded:
    """See `Recording`: what was recorded runs again."""

    def __init__(self, compute: Callable[[], Tensor], counter: LaunchCounter) -> None:
        self.output = compute()
        self._compute = compute
        self._counter = counter

    def replay(self) -> None:
        with self._counter.at(INSIDE):
            self._compute()


def count_step(name: str, sampling: SamplingParams = GREEDY) -> StepCount:
    """name: one of `SHAPES`."""
    counter = LaunchCounter(AROUND)
    with pytest.MonkeyPatch.context() as monkeypatch:
        kernels.install(monkeypatch, counter)
        model, attention = build(name)
        pool = make_pool(model)
        with counter:
            graphs = DecodeGraphs(
                model,
                pool,
                attention,
                lambda compute: _Recorded(compute, counter),
                batch_sizes=BATCH_SIZES,
                token_max=TOKEN_COUNT + 2,
            )
            kinds = [_kind(layer) for layer in model.layers]
            _tell_apart(model, counter, monkeypatch)
            runner = ModelRunner(model, pool, ManualClock(), graphs=graphs)
            ids = list(range(ROW_COUNT))
            runner.launch(_first_step(ids, pool, sampling))
            counter.names.clear()
            runner.launch(Step(2, decode=ids))
    return _sum_up(counter.names, kinds)


def build(name: str) -> tuple[CausalLm, RecordableAttention]:
    """A model without weights, and the backend that it would have on a GPU."""
    with tempfile.TemporaryDirectory(prefix="baton-launches-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPES[name]))
        config = read_served_config(directory)
    parallel = ParallelContext()
    shape = attention_shape(config, parallel, DEVICE, PAGE_SIZE)
    attention: RecordableAttention
    if shape.latent is not None:
        attention = FlashInferLatentAttention(shape.latent, dtype=shape.dtype, device=DEVICE)
    else:
        attention = FlashInferAttention(shape.kinds, dtype=shape.dtype, device=DEVICE)
    fused, known = FusedKernels(), fused_shape(config, parallel, DEVICE)
    fused.has_offset_norms = True
    if known.router is not None and known.expert_counts is not None:
        fused.experts.routers.add(known.router)
        fused.experts.counts.add(known.expert_counts)
    for rotation in known.rotations:
        fused.rotations.add(rotation)
        fused.normed_rotations |= {
            NormedRotation(rotation, is_offset) for is_offset in (False, True)
        }
    context = LayerContext(parallel, DEVICE, DTYPES[config.dtype], fused)
    family = FAMILIES[config.architecture]
    return family.model(config, context, AttentionChoice(attention, ""), family.build_layer), (
        attention
    )


def make_pool(model: CausalLm) -> KvPool:
    layout = ServerLayout(
        components=cache_components(model.config, "auto"),
        tp_size=1,
        stages=((0, LAYER_COUNT),),
        page_size=PAGE_SIZE,
    ).rank(0, 0)
    return KvPool.allocate(layout, [100] * len(layout.groups), DEVICE)


def _first_step(ids: list[int], pool: KvPool, sampling: SamplingParams) -> Step:
    """All prompts have been computed elsewhere, but for their last token."""
    return Step(
        1,
        new=[NewSequence(i, [5] * TOKEN_COUNT, TOKEN_COUNT, sampling) for i in ids],
        grants=[
            PageGrant(i, group, 0, list(range(1 + i * count, 1 + (i + 1) * count)))
            for group, count in enumerate(g.page_end(TOKEN_COUNT + 2) for g in pool.groups)
            for i in ids
        ],
        decode=ids,
    )


def _tell_apart(model: CausalLm, counter: LaunchCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer launches is counted in a place of its own."""
    places = {id(layer): f"layer {index}" for index, layer in enumerate(model.layers)}
    carry = PreNormLayer.carry

    def carry_there(
        layer: PreNormLayer, hidden: Tensor, added: Tensor | None, layer_pass: LayerPass
    ) -> tuple[Tensor, Tensor]:
        with counter.at(places[id(layer)]):
            return carry(layer, hidden, added, layer_pass)

    monkeypatch.setattr(PreNormLayer, "carry", carry_there)


def _kind(layer: DecoderLayer) -> str:
    """By what stands where the attention and the MLP do."""
    assert isinstance(layer, PreNormLayer)
    return f"{type(layer.attention).__name__}, {type(layer.mlp).__name__}"


def _sum_up(names: dict[str, Counter[str]], kinds: list[str]) -> StepCount:
    layers: dict[str, int] = {}
    for index, kind in enumerate(kinds):
        layers[kind] = names[f"layer {index}"].total()
    total = sum(of_place.total() for of_place in names.values())
    return StepCount(layers, total - sum(layers[kind] for kind in kinds), names)
