"""Whole models decode the same from recordings over FlashInfer's backends, by definition here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.engine.attention.attention import RecordableAttention
from common.engine.attention.flashinfer import FlashInferAttention
from common.engine.attention.flashinfer_latent import FlashInferLatentAttention
from common.engine.attention.trial import AttentionShape
from common.engine.distributed import ParallelContext
from common.engine.forward_batch import HostRows, SequenceChunk
from common.engine.graphs.decode_graphs import DecodeGraphs
from common.engine.loader import attention_shape, load_model
from tests.engine.flashinfer_by_definition import Rerun, install
from tests.engine.paged_decoding import PAGE_SIZE, make_batch, make_pool, shuffled_pages

PAGE_COUNT = 40


def backend_of(shape: AttentionShape) -> RecordableAttention:
    if shape.latent is not None:
        return FlashInferLatentAttention(shape.latent, dtype=shape.dtype, device=shape.device)
    return FlashInferAttention(shape.kinds, dtype=shape.dtype, device=shape.device)


def decoding(lengths: list[int], seed: int) -> list[SequenceChunk]:
    pages = shuffled_pages(PAGE_COUNT, seed)
    return [
        SequenceChunk([3 + index], length, ([pages.pop() for _ in range(length // 16 + 1)],), [0])
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    "recipe", ["gemma2", "gemma3", "gemma4_e", "gpt_oss", "qwen3_next", "deepseek_v3"]
)
def test_a_replay_decodes_as_the_model_does(
    tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    install(monkeypatch)
    model = load_model(tiny_checkpoint(recipe), dtype="float32")
    shape = attention_shape(model.config, ParallelContext(), torch.device("cpu"), PAGE_SIZE)
    replayed, plain = make_pool(model, PAGE_COUNT), make_pool(model, PAGE_COUNT)
    graphs = DecodeGraphs(
        model, replayed, backend_of(shape), Rerun, batch_sizes=[1, 2, 4], token_max=80
    )
    for buffers in zip(replayed.buffers, plain.buffers, strict=True):
        buffers[0].copy_(buffers[1])  # as if nothing had been recorded
    for seed, lengths in enumerate([[1, 40, 79], [16], [63, 5]]):
        expected = model.forward(make_batch(plain, decoding(lengths, seed)), plain)
        batch = make_batch(replayed, decoding(lengths, seed))
        index = torch.arange(len(lengths))
        actual = graphs.run(HostRows.of(batch), batch.token_ids, index)
        assert expected is not None and actual is not None
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
