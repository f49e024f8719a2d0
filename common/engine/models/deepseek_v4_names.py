"""Names of DeepSeek-V4's tensors: published, as transformers saves them, and as layers ask for."""

from __future__ import annotations

from common.engine.checkpoint.scaled_tensors import FLOAT8_SCALE_SUFFIX

ENDS = {
    "embed.weight": "model.embed_tokens.weight",
    "embed_tokens.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
HALVES = {
    "attn": "self_attn",
    "ffn": "mlp",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
}
"""New names for the part of a name after layers.N."""
ATTENTION_PARTS = {
    "wq_a": "q_a_proj",
    "q_norm": "q_a_norm",
    "wq_b": "q_b_proj",
    "wkv": "kv_proj",
    "wgate": "gate_proj",
    "norm": "kv_norm",
    "wo_a": "o_a_proj",
    "wo_b": "o_b_proj",
    "attn_sink": "sinks",
    "ape": "position_bias",
}
MLP_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def layer_name(name: str) -> str | None:
    """The name that layers ask for; None for what predicts more tokens at a time."""
    bare = name.removeprefix("model.")
    if bare.startswith("mtp."):
        return None
    if bare in ENDS:
        return ENDS[bare]
    first, *rest = bare.split(".")
    if first != "layers" or len(rest) < 2:
        return name
    layer, half, *parts = rest
    half = HALVES.get(half, half)
    if half == "self_attn":
        parts = _attention_parts(parts)
    elif half == "mlp":
        parts = [MLP_PARTS.get(part, part) for part in parts]
        if parts == ["gate", "bias"]:
            parts[1] = "e_score_correction_bias"
    if half in ("self_attn", "mlp") and parts[-1] == "scale":
        # Factors of a quantised weight.
        parts[-1] = "weight" + FLOAT8_SCALE_SUFFIX
    return ".".join(("model", "layers", layer, half, *parts))


def _attention_parts(parts: list[str]) -> list[str]:
    if "indexer" in parts:
        # Nested either way round.
        inner = [part for part in parts if part not in ("indexer", "compressor", "scorer")]
        parts = ["indexer", *inner]
    return [ATTENTION_PARTS.get(part, part) for part in parts]
