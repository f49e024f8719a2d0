"""Kernels around routed experts: by their definition here, in Triton's interpreter and on a GPU by
their own (`tests/kernel_packages`, `tests/gpu`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from common.engine import loader
from common.engine.config.mla import RouterConfig
from common.engine.layers import fused_experts
from common.engine.layers.choose_fused import FusedChoice
from common.engine.layers.expert_trial import check_order, check_router
from common.engine.layers.fused import FusedKernels
from common.engine.layers.fused_experts import (
    ExpertCounts,
    ExpertKernels,
    GroupedRouter,
    Router,
    SoftmaxRouter,
)
from common.engine.loader import fused_shape, load_model, read_served_config
from tests.engine.flashinfer_by_definition import install as install_flashinfer
from tests.engine.paged_decoding import Sequence, forward, make_pool

CPU, BF16 = torch.device("cpu"), torch.bfloat16
TOLERANCE = 3e-2


def route(
    logits: Tensor,
    count: int,
    *,
    is_normalized: bool,
    bias: Tensor | None = None,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    scores = logits.float().softmax(-1) if bias is None else logits.sigmoid()
    experts = (scores if bias is None else scores + bias).topk(count, dim=-1).indices
    shares = scores.gather(1, experts)
    if is_normalized:
        shares = shares / shares.sum(-1, keepdim=True)
    return (shares * scaling).to(logits.dtype), experts.int()


def arrange(
    hidden: Tensor, experts: Tensor, expert_count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert hidden.stride(1) == 1 and experts.is_contiguous()
    choices = list(enumerate(experts.flatten().tolist()))
    ordered = sorted(choices, key=lambda choice: choice[1])
    places = torch.empty(len(choices), dtype=torch.int32)
    for place, (choice, _) in enumerate(ordered):
        places[choice] = place
    rows = torch.stack([hidden[choice // experts.shape[1]] for choice, _ in ordered])
    of_rows = torch.tensor([expert for _, expert in ordered])
    ends = torch.tensor([int((of_rows <= expert).sum()) for expert in range(expert_count)])
    return rows, of_rows, ends.int(), places


def combine(
    outputs: Tensor,
    shares: Tensor,
    places: Tensor,
    beside: Tensor | None = None,
    beside_gate: Tensor | None = None,
) -> Tensor:
    of_tokens = outputs[places.long()].view(*shares.shape, -1).float()
    total = (of_tokens * shares.float()[..., None]).sum(1)
    if beside is not None:
        total += beside.float() * (1.0 if beside_gate is None else beside_gate.float().sigmoid())
    return total.to(outputs.dtype)


def fused_topk(
    logits: Tensor,
    bias: Tensor,
    group_count: int,
    groups_per_token: int,
    count: int,
    scaling: float,
    shares: Tensor,
    experts: Tensor,
) -> None:
    wanted = (logits.sigmoid() + bias).unflatten(1, (group_count, -1))
    best = wanted.topk(2, dim=-1).values.sum(-1).topk(groups_per_token, dim=-1).indices
    is_in = torch.zeros(wanted.shape[:2], dtype=torch.bool).scatter_(1, best, True)
    out = torch.where(is_in[..., None], wanted, float("-inf")).flatten(1)
    chosen = out.topk(count, dim=-1).indices
    scores = logits.sigmoid().gather(1, chosen)
    shares.copy_(scores * scaling / scores.sum(-1, keepdim=True))
    experts.copy_(chosen)


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Our kernels and the library's, by definition, or as they are given."""

    def run(**changes: Callable[..., object]) -> None:
        install_flashinfer(monkeypatch)
        found = {"route": route, "arrange": arrange, "combine": combine, "topk": fused_topk}
        found |= changes
        library = ModuleType("flashinfer.fused_moe")
        vars(library)["fused_topk_deepseek"] = found["topk"]
        monkeypatch.setitem(sys.modules, library.__name__, library)
        kernels = ModuleType("common.engine.layers.triton_experts")
        vars(kernels).update(found)
        monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
        monkeypatch.setattr("common.engine.layers.triton_experts", kernels, raising=False)

    return run


ROUTERS: dict[str, Router] = {
    "softmax": SoftmaxRouter(32, 4, is_normalized=False),
    "softmax, normalised": SoftmaxRouter(32, 4, is_normalized=True),
    "sigmoids": GroupedRouter(32, 4, True, RouterConfig(True, 1, 1, 2.5)),
    "groups": GroupedRouter(32, 4, True, RouterConfig(True, 8, 3, 2.5)),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_right_kernels_are_taken(name: str, install: Install) -> None:
    install()
    kernels = ExpertKernels()
    assert check_router(kernels, ROUTERS[name], BF16, CPU) <= 1e-6
    assert kernels.routers == {ROUTERS[name]}
    counts = ExpertCounts(32, 4)
    assert check_order(kernels, counts, BF16, CPU) <= TOLERANCE
    assert kernels.counts == {counts}


def not_normalised(logits: Tensor, count: int, **options: object) -> tuple[Tensor, Tensor]:
    return route(logits, count, is_normalized=False)


def second_best(logits: Tensor, count: int, **options: object) -> tuple[Tensor, Tensor]:
    shares, experts = route(logits, count + 1, is_normalized=False)
    return shares[:, 1:], experts[:, 1:]


def one_twice(logits: Tensor, count: int, **options: object) -> tuple[Tensor, Tensor]:
    shares, experts = route(logits, count, is_normalized=True)
    experts[:, 1] = experts[:, 0]
    return shares, experts


def without_bias(logits: Tensor, bias: Tensor, *rest: object) -> None:
    fused_topk(logits, torch.zeros_like(bias), *rest)  # type: ignore[arg-type]


def all_groups(
    logits: Tensor, bias: Tensor, group_count: int, of_token: int, *rest: object
) -> None:
    fused_topk(logits, bias, group_count, group_count, *rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "part", "mistake"),
    [
        ("softmax, normalised", "route", not_normalised),
        ("softmax", "route", second_best),
        ("softmax, normalised", "route", one_twice),
        ("groups", "topk", without_bias),
        ("groups", "topk", all_groups),
    ],
)
def test_a_router_that_is_wrong_is_found_out_at_start(
    name: str, part: str, mistake: Callable[..., object], install: Install
) -> None:
    install(**{part: mistake})
    assert not check_router(ExpertKernels(), ROUTERS[name], BF16, CPU) <= TOLERANCE


def unstable(hidden: Tensor, experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, of_rows, ends, places = arrange(hidden, experts, count)
    return rows.flip(0), of_rows, ends, len(places) - 1 - places


def starts(hidden: Tensor, experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, of_rows, ends, places = arrange(hidden, experts, count)
    return rows, of_rows, ends.roll(1), places


def without_gate(outputs: Tensor, shares: Tensor, places: Tensor, *beside: Tensor | None) -> Tensor:
    return combine(outputs, shares, places, *beside[:1])


def in_the_order_of_experts(
    outputs: Tensor, shares: Tensor, places: Tensor, *beside: Tensor | None
) -> Tensor:
    return combine(outputs, shares, torch.arange(len(places)), *beside)


@pytest.mark.parametrize(
    ("part", "mistake"),
    [
        ("arrange", unstable),
        ("arrange", starts),
        ("combine", without_gate),
        ("combine", in_the_order_of_experts),
    ],
)
def test_an_order_that_is_wrong_is_found_out_at_start(
    part: str, mistake: Callable[..., object], install: Install
) -> None:
    install(**{part: mistake})
    assert not check_order(ExpertKernels(), ExpertCounts(32, 4), BF16, CPU) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["qwen3_moe", "deepseek_v3", "deepseek_v4", "gpt_oss", "qwen3_next", "nemotron_h"]
)
@torch.inference_mode()
def test_models_compute_the_same_by_kernels_and_without(
    recipe: str,
    install: Install,
    tiny_checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In fp32; rows above a bound are ordered without kernels."""
    install()
    monkeypatch.setattr(fused_experts, "CHOICES_MAX", 20)
    path = tiny_checkpoint(recipe)
    config = read_served_config(path)
    plain = load_model(path)
    kernels, known = FusedKernels(), fused_shape(config, plain.context.parallel, CPU)
    assert known.expert_counts is not None
    kernels.experts.counts.add(known.expert_counts)
    if known.router is not None:
        kernels.experts.routers.add(known.router)
    monkeypatch.setattr(loader, "choose_fused", lambda shape: FusedChoice(kernels, ""))
    results = []
    for model in (plain, load_model(path)):
        pool, sequence = make_pool(model, 4), Sequence(list(range(3, 23)), [2, 4, 1])
        results.append([forward(model, pool, [sequence.chunk(size)]) for size in (12, 7, 1)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
