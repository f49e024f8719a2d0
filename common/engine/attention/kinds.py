"""Kinds of attention layers on one rank. A fast kernel is compiled and checked for each kind.

Pure values; knows nothing of kernels, pages or devices.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Layers over keys and values.

    head_count, kv_head_count: of this rank. window: tokens that are seen, itself included; 0 for
    all. scale, softcap: as `ScoreRule`. has_sinks: whether its scores meet a sink per query head.
    """

    head_count: int
    kv_head_count: int
    head_dim: int
    window: int = 0
    scale: float | None = None
    softcap: float = 0.0
    has_sinks: bool = False

    @property
    def score_scale(self) -> float:
        """The factor on scores, whether the model names it or not."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def __str__(self) -> str:
        parts = [f"head dim {self.head_dim}"]
        if self.window:
            parts.append(f"window {self.window}")
        if self.softcap:
            parts.append(f"softcap {self.softcap:g}")
        if self.has_sinks:
            parts.append("sinks")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class LatentKind:
    """Layers over latent rows. head_count: of this rank; the dims: as `MlaConfig`.

    scale: on scores. has_selection: whether its layers see chosen tokens only, once there are many.
    """

    head_count: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float
    has_selection: bool = False

    def __str__(self) -> str:
        return f"latent dim {self.latent_dim} + {self.rope_dim}"
