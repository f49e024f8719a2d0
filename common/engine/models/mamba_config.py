"""Sizes of a Mamba-2 mixer, as the readers of the families that have one fill them in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.engine.config.json_fields import JsonFields, JsonValue
from common.engine.config.model import FamilyConfig
from common.engine.layers.group_norm import GateStyle


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """head_count heads of head_dim channels each; groups share what is written and read, vectors of
    state_dim.

    kernel_size: taps of the convolution, the current input's included. gate: its place.
    has_input_bias, has_output_bias: of the projections. epsilon: of the norm behind the recurrence.
    """

    head_count: int
    head_dim: int
    group_count: int
    state_dim: int
    kernel_size: int
    gate: GateStyle
    epsilon: float
    has_conv_bias: bool = True
    has_input_bias: bool = False
    has_output_bias: bool = False

    @property
    def inner_size(self) -> int:
        """Channels of all heads."""
        return self.head_count * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels that are convolved: x, and B and C of every group."""
        return self.inner_size + 2 * self.group_count * self.state_dim

    @property
    def projected_size(self) -> int:
        """Of the input projection: gate, what is convolved, and a step per head."""
        return self.inner_size + self.conv_size + self.head_count


@dataclass(frozen=True, slots=True)
class MambaFamily(FamilyConfig):
    """A family whose layers have such mixers.

    mamba_layers, attention_layers: global ids of the layers that have which; some may have both.
    is_rotated: whether attention rotates its keys.
    """

    mamba: MambaConfig
    mamba_layers: tuple[int, ...]
    attention_layers: tuple[int, ...]
    is_rotated: bool

    def cuts(self) -> Mapping[str, int]:
        return {"Mamba heads": self.mamba.head_count}

    def shared_cuts(self) -> Mapping[str, int]:
        return {"Mamba groups": self.mamba.group_count}


def check_sizes(fields: JsonFields, *, heads_key: str, groups_key: str, kernel_key: str) -> None:
    """Raises: ConfigError for heads that groups don't divide, or a convolution of one tap."""
    head_count = fields.integer(heads_key)
    if head_count % fields.integer(groups_key) != 0:
        raise fields.error(groups_key, f"a divisor of {heads_key} = {head_count}")
    fields.integer(kernel_key, minimum=2)


def check_step_limit(fields: JsonFields) -> None:
    """The bounds of dt, in the spelling of Python's JSON or that of transformers 5.

    Raises: ConfigError for bounds that bind.
    """
    limit: JsonValue = fields.values.get("time_step_limit")
    endless = [[0, float("inf")], [0, {"__float__": "Infinity"}]]
    if limit is not None and limit not in endless:
        raise fields.error("time_step_limit", "[0.0, Infinity]: bounds of a step are not supported")
