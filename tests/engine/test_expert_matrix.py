"""Experts' weights that stay as they are stored: the same products, and less memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.engine.checkpoint.codes import Codes
from common.engine.checkpoint.float4_groups import unpack_groups
from common.engine.layers import expert_groups, expert_matrix, stored_experts
from common.engine.layers.expert_groups import ExpertGroups
from common.engine.layers.expert_matrix import ExpertMatrix
from common.engine.layers.narrow import NarrowWeights
from common.engine.layers.stored_experts import Scratch, StoredExperts
from common.engine.loader import load_model
from common.engine.models.causal_lm import CausalLm
from tests.engine.paged_decoding import Sequence, forward, make_pool
from tests.engine.stored_formats import FORMATS, write_twins
from tests.engine.test_narrow import has_int8

Checkpoints = Callable[[str], Path]
CPU = torch.device("cpu")
COUNT, ROWS, COLUMNS = 5, 256, 128


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def float8(seed: int, *, by_block: bool, columns: int = 3 * COLUMNS) -> Codes:
    values = torch.randn(ROWS, columns, generator=draw(seed)).to(torch.float8_e4m3fn)
    if not by_block:
        return Codes(values, torch.rand(ROWS, 1, generator=draw(seed)), None, 8, columns)
    scales = torch.rand(ROWS // 128, -(-columns // 128), generator=draw(seed))
    return Codes(values, scales.repeat_interleave(128, 0), None, 8, 128)


def integers(
    seed: int, bits: int, group_size: int, *, has_zeros: bool, dtype: torch.dtype = torch.float16
) -> Codes:
    limit = 1 << (bits - 1)
    shape = (ROWS, COLUMNS // group_size)
    values = torch.randint(-limit, limit, (ROWS, COLUMNS), generator=draw(seed)).to(torch.int8)
    scales = torch.rand(shape, generator=draw(seed)).to(dtype).float()
    zeros = torch.randint(-limit, limit, shape, generator=draw(seed)).float() if has_zeros else None
    return Codes(values, scales, zeros, bits, group_size)


def float4(seed: int) -> Codes:
    packed = torch.randint(0, 256, (ROWS, 4, 16), dtype=torch.uint8, generator=draw(seed))
    powers = torch.randint(110, 130, (ROWS, 4), dtype=torch.uint8, generator=draw(seed))
    return Codes(*unpack_groups(packed, powers), None, 4, 32, is_float4=True)


def cut_inside_a_group(codes: Codes) -> Codes:
    """As a rank's columns may be: the first group ends after 20."""
    groups = (torch.arange(COLUMNS - 12) + 12) // 32
    return replace(codes, values=codes.values[:, 12:], group_size=0, groups=groups)


FORMS: dict[str, tuple[Callable[[int], Codes], float, str]] = {
    "float8 by blocks": (
        lambda seed: float8(seed, by_block=True), 1 + 4 / 128**2,
        "float8_e4m3fn by blocks of 128 x 128",
    ),
    "float8, the last block cut": (
        lambda seed: float8(seed, by_block=True, columns=300), 1 + 3 * 4 / 300 / 128,
        "float8_e4m3fn by blocks of 128 x 128",
    ),
    "float8 by rows": (
        lambda seed: float8(seed, by_block=False), 1 + 4 / 384, "float8_e4m3fn by rows",
    ),
    "int8 with zeros": (
        lambda seed: integers(seed, 8, COLUMNS, has_zeros=True), 1 + 3 / COLUMNS, "int8 by rows",
    ),
    "int4": (
        lambda seed: integers(seed, 4, 32, has_zeros=False), 0.5 + 2 / 32, "int4 by groups of 32",
    ),
    "int4 with zeros, fp32 factors": (
        lambda seed: integers(seed, 4, 64, has_zeros=True, dtype=torch.float32), 0.5 + 5 / 64,
        "int4 by groups of 64",
    ),
    "int4, cut inside a group": (
        lambda seed: cut_inside_a_group(integers(seed, 4, 32, has_zeros=True)),
        0.5 + 4 * 3 / (COLUMNS - 12), "int4 by groups of some columns",
    ),
    "float4": (float4, 0.5 + 2 / 32, "float4 by groups of 32"),
}  # fmt: skip


def stored(name: str) -> tuple[StoredExperts, Callable[[torch.dtype], Tensor]]:
    """Experts of a form, and what they are wide."""
    make, _, _ = FORMS[name]
    each = [make(seed) for seed in range(COUNT)]
    kept = StoredExperts(COUNT, each[0])
    assert not kept.is_whole
    assert all(kept.put(expert, codes) for expert, codes in enumerate(each))
    return kept, lambda dtype: torch.stack([codes.widen().to(dtype) for codes in each])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FORMS)
def test_stored_experts_are_made_wide_to_the_same_bits(name: str, dtype: torch.dtype) -> None:
    kept, wide = stored(name)
    expected = wide(dtype)
    chosen = torch.tensor([3, 0, 3])
    assert torch.equal(kept.widen(torch.empty_like(expected)), expected)
    assert torch.equal(kept.widen(torch.empty_like(expected[:3]), chosen), expected[chosen])
    assert torch.equal(kept.widen_one(torch.empty_like(expected[4]), 4), expected[4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_float4", [True, False])
def test_two_elements_of_a_byte_are_the_same_by_table_and_by_arithmetic(
    dtype: torch.dtype, is_float4: bool
) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    by_table, computed = torch.empty(2, 1, 16, 32, dtype=dtype)
    stored_experts._unpack_by_table(by_table, values, is_float4=is_float4)
    stored_experts._unpack(computed, values, is_float4=is_float4)
    assert torch.equal(by_table, computed) and by_table.unique().numel() == (
        15 if is_float4 else 16
    )


@pytest.mark.parametrize("name", FORMS)
def test_stored_experts_take_the_bytes_of_their_form(name: str) -> None:
    kept, _ = stored(name)
    _, per_element, said = FORMS[name]
    assert kept.nbytes == round(COUNT * ROWS * kept.columns * per_element)
    assert kept.name.startswith(said) and kept.name.endswith(", made wide for each product")


def test_an_expert_of_another_form_is_not_taken() -> None:
    kept = StoredExperts(COUNT, float8(0, by_block=True))
    assert kept.put(0, float8(0, by_block=True))
    assert not kept.put(1, float8(1, by_block=False))
    assert not kept.put(1, integers(1, 8, COLUMNS, has_zeros=False))
    cut = StoredExperts(COUNT, cut_inside_a_group(integers(0, 4, 32, has_zeros=True)))
    other = cut_inside_a_group(integers(1, 4, 32, has_zeros=True))
    assert other.groups is not None and not cut.put(1, replace(other, groups=other.groups.flip(0)))


def matrix(narrow: NarrowWeights = NarrowWeights.NARROW) -> ExpertMatrix:
    rows = torch.empty(COUNT, ROWS, 3 * COLUMNS, dtype=torch.bfloat16, device="meta")
    return ExpertMatrix(rows, narrow, CPU, Scratch())


def test_experts_of_two_forms_are_all_made_wide() -> None:
    """Whichever comes first; those that were kept already, too."""
    mixed = matrix()
    blocks, rows = float8(1, by_block=True), float8(2, by_block=False)
    for expert in range(COUNT - 1):
        assert mixed.experts[expert].keep([blocks])
    assert not mixed.experts[COUNT - 1].keep([rows])
    target = mixed.rows[COUNT - 1]
    mixed.experts[COUNT - 1].room(target).copy_(rows.widen())
    mixed.pack()
    expected = [blocks.widen().bfloat16()] * (COUNT - 1) + [rows.widen().bfloat16()]
    assert torch.equal(mixed.rows, torch.stack(expected))
    ((name, nbytes),) = mixed.forms
    assert name == "experts of bfloat16, aten::_grouped_mm" and nbytes == mixed.rows.nbytes


def test_a_cpu_keeps_stored_experts_only_where_it_is_asked_to() -> None:
    codes = float8(1, by_block=True)
    kept = {narrow: matrix(narrow).experts[0].keep([codes]) for narrow in NarrowWeights}
    assert kept == {"auto": False, "narrow": True, "wide": False}


@pytest.mark.parametrize("row_count", [1, 40])
@torch.inference_mode()
def test_a_card_is_not_asked_which_experts_have_rows(
    row_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows have a copy of their experts' weights each; more have those of all experts."""
    monkeypatch.setattr(expert_matrix, "HOST_ASKS", ())
    monkeypatch.setattr(expert_matrix, "BY_ROW_NBYTES", 2 * ROWS * 3 * COLUMNS * 2)
    each = [float8(seed, by_block=True) for seed in range(COUNT)]
    narrow = matrix(NarrowWeights.AUTO)
    assert all(narrow.experts[expert].keep([codes]) for expert, codes in enumerate(each))
    narrow.pack()
    wide = torch.stack([codes.widen().bfloat16() for codes in each])
    experts = torch.randint(0, COUNT, (row_count,), generator=draw(3)).sort().values
    groups = ExpertGroups.of(experts, COUNT, row_max=row_count, has_kernel=True)
    inputs = torch.randn(row_count, 3 * COLUMNS, generator=draw(4)).bfloat16()
    found = narrow.multiply(groups, inputs)
    is_by_row = expert_groups.BY_ROW_SHARE * row_count < COUNT
    expected = groups.multiply_by_row(inputs, wide) if is_by_row else groups.multiply(inputs, wide)
    assert torch.equal(found, expected)
    monkeypatch.setattr(expert_matrix, "HOST_ASKS", ("cpu",))
    torch.testing.assert_close(narrow.multiply(groups, inputs), expected)


def steps_of(model: CausalLm) -> list[Tensor]:
    pool, sequence = make_pool(model, 4), Sequence(list(range(3, 23)), [2, 4, 1])
    with torch.inference_mode():
        return [forward(model, pool, [sequence.chunk(size)]) for size in (12, 7, 1)]


EXPERTS_OF = {
    "fp8 channel": "float8_e4m3fn by rows",
    "int8 with zeros": "int8 by rows",
    "int4 groups": "int4 by groups of 32",
    "gptq by activation": "int4 by groups of some columns",
    "awq": "int4 by groups of 32",
}


@pytest.mark.slow
@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("name", EXPERTS_OF)
def test_models_compute_the_same_with_stored_experts(
    name: str,
    asks: bool,
    tiny_checkpoint: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In fp32, where no other weight stays narrow."""
    monkeypatch.setattr(expert_matrix, "HOST_ASKS", ("cpu",) if asks else ())
    path, _ = write_twins(tiny_checkpoint("qwen3_moe"), tmp_path, FORMATS[name])
    wide = load_model(path, packs=True)
    narrow = load_model(path, packs=True, narrow=NarrowWeights.NARROW)
    assert f"experts of {EXPERTS_OF[name]}" in narrow.describe()["weights"]
    for expected, found in zip(steps_of(wide), steps_of(narrow), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@has_int8
@pytest.mark.slow
def test_a_cpu_multiplies_by_experts_of_integers_one_by_one(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path, _ = write_twins(tiny_checkpoint("qwen3_moe"), tmp_path, FORMATS["int8"])
    models = [
        load_model(path, dtype="bfloat16", packs=True, narrow=narrow)
        for narrow in (NarrowWeights.WIDE, NarrowWeights.NARROW)
    ]
    assert "experts of int8 by rows and tokens, onednn::qlinear" in models[1].describe()["weights"]
    for expected, found in zip(*map(steps_of, models), strict=True):
        assert (found - expected).norm() / expected.norm() < 0.05
