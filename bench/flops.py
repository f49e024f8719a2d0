"""Floating point operations of a forward pass, by the model's sizes alone: two for every multiply
and add of a matrix product. Norms, rotations and softmax are left out, as is usual.
"""

from __future__ import annotations

from common.engine.config.model import ModelConfig


def count_flops(config: ModelConfig, start: int, stop: int, logits_row_count: int = 1) -> int:
    """Of computing the tokens start .. stop of one sequence whose earlier tokens are in the cache.

    Attention is causal: a token reads itself and what is before it. For models of dense layers
    with grouped queries and a gated MLP, all layers alike.
    """
    assert config.moe is None and config.mla is None, config.architecture
    assert config.has_plain_attention, config.architecture
    token_count = stop - start
    hidden, head_dim = config.hidden_size, config.head_dim
    query_size, kv_size = config.head_count * head_dim, config.kv_head_count * head_dim
    projections = hidden * (query_size + 2 * kv_size) + query_size * hidden
    mlp = 3 * hidden * config.intermediate_size
    # Tokens that are read, summed over the tokens that read: start + 1, start + 2 ... stop.
    read_count = (stop * (stop + 1) - start * (start + 1)) // 2
    attention = 2 * query_size * read_count  # scores, and their sums over values
    head = hidden * config.vocab_size * logits_row_count
    return 2 * (config.layer_count * (token_count * (projections + mlp) + attention) + head)
