"""What torch's own kernels leave of an engine's time: products and attention, and nothing else.

The matrix products of a dense model with grouped queries, and its attention over keys and values
that lie side by side, for a batch of prompts and its tokens. An engine that computes with these
kernels is slower: it has norms and rotations to compute, a cache to keep and tokens to draw.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.config.model import ModelConfig


class Products:
    """Random weights and inputs of one shape; prepared, so that `run` computes only."""

    def __init__(
        self, config: ModelConfig, batch: int, prompt_length: int, output_length: int
    ) -> None:
        heads, kv_heads, dim = config.head_count, config.kv_head_count, config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        sizes = (
            (hidden, (heads + 2 * kv_heads) * dim),
            (heads * dim, hidden),
            (hidden, 2 * inner),
            (inner, hidden),
        )
        self._layer_count = config.layer_count
        self._batch = batch
        self._prompt_length = prompt_length
        self._total_length = prompt_length + output_length
        rows = batch * prompt_length
        self._layer = [(torch.randn(rows, n), torch.randn(m, n)) for n, m in sizes]
        self._head = (torch.randn(batch, hidden), torch.randn(config.vocab_size, hidden))
        self._keys, self._values = torch.randn(2, batch, kv_heads, self._total_length, dim)
        self._prompt_query = torch.randn(batch, heads, prompt_length, dim)
        self._query = torch.randn(batch, kv_heads, heads // kv_heads, dim)

    @torch.inference_mode()
    def run(self) -> None:
        keys, values = (part[:, :, : self._prompt_length] for part in (self._keys, self._values))
        for _ in range(self._layer_count):
            self._project(self._batch * self._prompt_length)
            F.scaled_dot_product_attention(
                self._prompt_query, keys, values, is_causal=True, enable_gqa=True
            )
        F.linear(*self._head)
        for length in range(self._prompt_length + 1, self._total_length):
            keys, values = (part[:, :, :length] for part in (self._keys, self._values))
            for _ in range(self._layer_count):
                self._project(self._batch)
                F.scaled_dot_product_attention(self._query, keys, values)
            F.linear(*self._head)

    def _project(self, row_count: int) -> list[Tensor]:
        """The four products of a layer."""
        return [F.linear(given[:row_count], weight) for given, weight in self._layer]
