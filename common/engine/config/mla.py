"""Reader of config.json for latent attention and the routers that come with it.

Checked and in one spelling, as the readers of `models`, which call it. Knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.engine.config.json_fields import JsonFields


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Attention whose cache is one row per token, shared by all heads: a latent and a rotated part.

    query_rank: width that queries are projected through; None if they are projected directly.
    latent_dim, rope_dim: the parts of a cached row. nope_dim, value_dim: per head, of the key that
        is not rotated and of the value, both made of the latent.
    """

    query_rank: int | None
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    @property
    def row_dim(self) -> int:
        """Elements of a cached row."""
        return self.latent_dim + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Of one query head, and of the key it meets."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """A router that first chooses groups of experts, then experts inside them; both in fp32.

    is_sigmoid: scores are sigmoids and a learned bias takes part in the choice (a group counts its
        two best experts); softmax without a bias otherwise (a group counts its best).
    groups_per_token: of group_count. scaling: factor on the chosen experts' shares.
    """

    is_sigmoid: bool
    group_count: int
    groups_per_token: int
    scaling: float


def read_mla(fields: JsonFields) -> MlaConfig:
    """Raises: ConfigError for a width that is missing or impossible."""
    if "q_lora_rank" not in fields.values:
        raise fields.error("q_lora_rank", "an integer, or null for queries without one")
    rope_dim = fields.integer("qk_rope_head_dim")
    if rope_dim % 2 != 0:
        raise fields.error("qk_rope_head_dim", "even, for rotary embeddings")
    return MlaConfig(
        query_rank=fields.integer("q_lora_rank") if fields.has("q_lora_rank") else None,
        latent_dim=fields.integer("kv_lora_rank"),
        rope_dim=rope_dim,
        nope_dim=fields.integer("qk_nope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
    )


def read_router(fields: JsonFields, *, is_sigmoid: bool, expert_count: int) -> RouterConfig:
    """is_sigmoid: what the architecture's code does; a config.json that says otherwise is refused.

    Raises: ConfigError for groups that the experts don't fill, or a method that is not known.
    """
    function = "sigmoid" if is_sigmoid else "softmax"
    if fields.text("scoring_func", function) != function:
        raise fields.error("scoring_func", f'"{function}" for this architecture')
    methods = ("noaux_tc",) if is_sigmoid else ("greedy", "group_limited_greedy")
    method = fields.text("topk_method", methods[0])
    if method not in methods:
        raise fields.error("topk_method", f"one of {', '.join(methods)}")
    scaling = fields.number("routed_scaling_factor", 1.0)
    if method == "greedy":
        return RouterConfig(is_sigmoid, 1, 1, scaling)
    group_count = fields.integer("n_group")
    groups_per_token = fields.integer("topk_group")
    if expert_count % group_count != 0:
        raise fields.error("n_group", f"a divisor of n_routed_experts = {expert_count}")
    if groups_per_token > group_count:
        raise fields.error("topk_group", f"at most n_group = {group_count}")
    group_size = expert_count // group_count
    if is_sigmoid and group_count > 1 and group_size < 2:
        raise fields.error("n_group", f"at most {expert_count // 2}: a group counts its two best")
    if fields.integer("num_experts_per_tok") > groups_per_token * group_size:
        raise fields.error("num_experts_per_tok", f"at most {groups_per_token * group_size}, the "
                           f"experts of topk_group = {groups_per_token} groups")  # fmt: skip
    return RouterConfig(is_sigmoid, group_count, groups_per_token, scaling)
