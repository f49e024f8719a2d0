"""What FlashInfer is given of latent rows: against torch's path, by wrappers that compute by
definition. The kernels themselves need a GPU; `tests/gpu` has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.engine.attention import flashinfer_latent
from common.engine.attention.flashinfer_latent import (
    FlashInferLatentAttention,
    absorbed_sequences,
)
from common.engine.attention.kinds import LatentKind
from common.engine.attention.latent import LatentAttention, LatentProjection
from common.engine.attention.trial import (
    TOLERANCE,
    AttentionShape,
    check_latent,
    check_recorded_latent,
    random_batch,
)
from common.engine.cache.kv_pool import KvPool
from common.engine.distributed import ParallelContext
from common.engine.forward_batch import HostRows
from common.engine.loader import attention_shape, load_model
from common.layout.cache_layout import ServerLayout
from common.layout.families import mla_components
from tests.engine.flashinfer_by_definition import Kept, Mla, Rerun, install
from tests.engine.paged_decoding import Sequence, forward
from tests.engine.paged_decoding import make_pool as make_model_pool

CPU = torch.device("cpu")
KIND = LatentKind(4, 32, 8, 16, 12, scale=24**-0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("absorbed_max", [0, 4 * 30, 2**18])
def test_what_is_planned_is_the_attention_of_latent_rows(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, absorbed_max: int
) -> None:
    install(monkeypatch)
    monkeypatch.setattr(flashinfer_latent, "ABSORBED_MAX", absorbed_max)
    shape = AttentionShape((), dtype, CPU, 16, latent=KIND)
    backend = FlashInferLatentAttention(KIND, dtype=dtype, device=CPU)
    assert check_latent(backend, KIND, shape) < TOLERANCE[dtype]
    monkeypatch.setattr(Mla, "run", lambda self, **parts: torch.zeros_like(parts["q_nope"]))
    assert check_latent(backend, KIND, shape) > 0.1


def make_pool() -> KvPool:
    components = mla_components(
        layer_count=1, latent_dim=32, rope_dim=8, is_interleaved=False, dtype="float32"
    )
    pool = KvPool.allocate(ServerLayout(components, 1, ((0, 1),), 16).rank(0, 0), [40], CPU)
    content = pool.buffers[0].view(torch.float32)
    content.copy_(torch.randn(content.shape, generator=torch.Generator().manual_seed(0)))
    return pool


def test_chunks_are_absorbed_behind_a_prefix_and_while_they_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = ((0, 5), (7, 1), (16, 6), (20, 6), (0, 1), (3, 4))
    batch = random_batch(lengths, make_pool(), CPU)
    assert absorbed_sequences(batch, 4) == [1, 2, 3, 4, 5]
    # Room for ten new tokens of chunks.
    monkeypatch.setattr(flashinfer_latent, "ABSORBED_MAX", 43)
    assert absorbed_sequences(batch, 4) == [1, 2, 4, 5]


def test_a_recorded_decode_reads_what_was_planned_last(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    pool = make_pool()
    backend = FlashInferLatentAttention(KIND, dtype=torch.float32, device=CPU)
    backend.reserve((1, 2, 4), page_max=10)
    generator = torch.Generator().manual_seed(1)
    projection = LatentProjection(
        torch.randn(4, 16, 32, generator=generator),
        torch.randn(4, 12, 32, generator=generator),
        KIND.scale,
    )
    query = torch.randn(2, 4, 24, generator=generator)
    row = torch.randn(2, 40, generator=generator)
    batches = [
        random_batch(lengths, pool, CPU)
        for lengths in (((1, 1), (1, 1)), ((130, 1), (47, 1)), ((20, 1), (159, 1)))
    ]
    backend.plan_recorded(HostRows.of(batches[0]), pool)
    recorded = backend.start_recorded(batches[0], pool)
    for batch in batches:
        backend.plan_recorded(HostRows.of(batch), pool)
        expected = LatentAttention().start(batch, pool).attend_latent(0, query, row, projection)
        # The rows are in the cache by now; the recording reads them where the last plan says.
        found = recorded.attend_cached(0, query, projection)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0.0)


def test_a_recording_is_tried_by_a_replay_of_longer_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch)
    shape = AttentionShape((), torch.float32, CPU, 16, latent=KIND)
    backend = FlashInferLatentAttention(KIND, dtype=torch.float32, device=CPU)
    assert check_recorded_latent(backend, KIND, shape, Rerun) < TOLERANCE[torch.float32]
    assert check_recorded_latent(backend, KIND, shape, Kept) > 0.1


@pytest.mark.parametrize("recipe", ["deepseek_v2", "deepseek_v3", "kimi_linear", "ling_2_5"])
def test_models_decode_the_same_by_kernels(
    tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    install(monkeypatch)
    calls: list[int] = []
    run = Mla.run

    def counted(self: Mla, **parts: Tensor) -> Tensor:
        calls.append(len(parts["q_nope"]))
        return run(self, **parts)

    monkeypatch.setattr(Mla, "run", counted)
    plain = load_model(tiny_checkpoint(recipe))
    shape = attention_shape(plain.config, ParallelContext(), CPU, 16)
    assert shape.latent is not None
    backend = FlashInferLatentAttention(shape.latent, dtype=shape.dtype, device=CPU)
    fast = load_model(tiny_checkpoint(recipe), attention=backend)
    logits: list[list[Tensor]] = []
    for model in (plain, fast):
        pool = make_model_pool(model, 4)
        sequence = Sequence(list(range(3, 40)), [2, 4, 1])
        logits.append([forward(model, pool, [sequence.chunk(size)]) for size in (20, 16, 1)])
    for expected, found in zip(*logits, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0.0)
    assert set(calls) == {16, 1}
