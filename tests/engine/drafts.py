"""Layers that predict one token more, added to tiny checkpoints, and a slow twin of them.

The twin is transformers' own model of one layer: what is joined of embedding and state are its
inputs, the norm behind the layer is its last one. It knows neither cache nor passes: each guess
runs the layer over all rows again.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.tiny_checkpoints import Reference, edit_config, edit_tensors

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class NextnFormat:
    """How a family stores the layer. layer: prefix of its tensors; parts: of those around it.

    has_offset: whether norms are stored as offsets from one.
    """

    layer: str
    state_norm: str
    token_norm: str
    join: str
    norm: str
    has_offset: bool = False


def deepseek_format(layer_count: int) -> NextnFormat:
    name = f"model.layers.{layer_count}."
    return NextnFormat(
        name, f"{name}hnorm", f"{name}enorm", f"{name}eh_proj", f"{name}shared_head.norm"
    )


QWEN_FORMAT = NextnFormat(
    "mtp.layers.0.",
    "mtp.pre_fc_norm_hidden",
    "mtp.pre_fc_norm_embedding",
    "mtp.fc",
    "mtp.norm",
    has_offset=True,
)


def format_of(directory: Path) -> NextnFormat:
    config = json.loads((directory / "config.json").read_text())
    if config["architectures"][0].startswith("Qwen3"):
        return QWEN_FORMAT
    return deepseek_format(config["num_hidden_layers"])


def add_nextn(source: Path, directory: Path, *, seed: int = 0) -> Path:
    """A copy of a checkpoint with such a layer, random, of the kind of its last one."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    stored = format_of(directory)
    last = f"model.layers.{_layer_count(directory) - 1}."
    generator = torch.Generator().manual_seed(seed)

    def like(tensor: Tensor) -> Tensor:
        if tensor.dim() == 1:
            spread = torch.randn(tensor.shape, generator=generator) * 0.15
            return spread + tensor.mean()
        return torch.randn(tensor.shape, generator=generator) * tensor.std()

    def add(tensors: Tensors) -> None:
        # The last layer may share the choice of tokens; the one behind it chooses by itself.
        first = "model.layers.0."
        sources = {
            stored.layer + name.removeprefix(prefix): name
            for prefix, part in ((first, "self_attn.indexer."), (last, ""))
            for name in tensors
            if name.startswith(prefix + part)
        }
        for name, source_name in sources.items():
            tensors[name] = like(tensors[source_name])
        for norm in (stored.state_norm, stored.token_norm, stored.norm):
            tensors[f"{norm}.weight"] = like(tensors["model.norm.weight"])
        size = len(tensors["model.norm.weight"])
        join = torch.randn(size, 2 * size, generator=generator) * (2 * size) ** -0.5
        tensors[f"{stored.join}.weight"] = join

    edit_tensors(directory, add)
    if not stored.has_offset:
        edit_config(directory, num_nextn_predict_layers=1)
    return directory


def add_copying_nextn(source: Path, directory: Path, *, noise: float = 0.0, seed: int = 0) -> Path:
    """A copy of a checkpoint of which only the last layer does anything, and the layer that
    predicts one token more is that layer: it guesses as the model does, but for the first token,
    which it can't see.

    noise: how much of the hidden states is mixed into its inputs.
    """
    add_nextn(source, directory, seed=seed)
    stored, count = format_of(directory), _layer_count(directory)
    last = f"model.layers.{count - 1}."
    idle = tuple(f"model.layers.{layer}." for layer in range(count - 1))
    # The layer behind the model chooses tokens as that layer does whose choice the last one shares.
    chooser = f"model.layers.{_last_chooser(directory)}."

    def change(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            is_output = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
            if name.startswith(idle) and is_output:
                tensor.zero_()
            if name.startswith(last):
                tensors[stored.layer + name.removeprefix(last)].copy_(tensor)
        if chooser != last:
            for part in ("input_layernorm", "self_attn.q_a_proj", "self_attn.q_a_layernorm"):
                tensors[f"{chooser}{part}.weight"].copy_(tensors[f"{last}{part}.weight"])
            for name in [one for one in tensors if one.startswith(f"{chooser}self_attn.indexer.")]:
                tensors[stored.layer + name.removeprefix(chooser)].copy_(tensors[name])
        embedding = tensors["model.embed_tokens.weight"]
        embedding /= embedding.pow(2).mean(-1, keepdim=True).sqrt()
        tensors[f"{stored.token_norm}.weight"].fill_(0.0 if stored.has_offset else 1.0)
        tensors[f"{stored.norm}.weight"].copy_(tensors["model.norm.weight"])
        size = len(tensors["model.norm.weight"])
        join = tensors[f"{stored.join}.weight"]
        join[:, :size] = torch.eye(size)
        join[:, size:] *= noise

    edit_tensors(directory, change)
    return directory


class NextnTwin:
    """The layer in float32, by its published definition."""

    def __init__(self, directory: Path, scratch: Path) -> None:
        """scratch: an empty directory for a checkpoint of the layer alone."""
        self._stored = stored = format_of(directory)
        self._tensors = tensors = load_file(directory / "model.safetensors")
        self._target = Reference.load(directory).model
        config = json.loads((directory / "config.json").read_text())
        self._epsilon = config["rms_norm_eps"]
        config |= {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_only_layers": []}
        for key in ("layer_types", "mlp_layer_types"):
            if key in config:
                config[key] = config[key][-1:]
        if "indexer_types" in config:
            config["indexer_types"] = ["full"]
        alone = {
            name.replace(stored.layer, "model.layers.0."): tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith(stored.layer)
        }
        alone["model.norm.weight"] = tensors[f"{stored.norm}.weight"].clone()
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in tensors:
                alone[name] = tensors[name].clone()
        (scratch / "config.json").write_text(json.dumps(config))
        save_file(alone, scratch / "model.safetensors", {"format": "pt"})
        self._layer = Reference.load(scratch).model

    @torch.inference_mode()
    def read(self, token_ids: list[int]) -> Tensor:
        """What the model's last norm makes of each token, float32[tokens, hidden size]."""
        states: Tensor = self._target.model(torch.tensor([token_ids])).last_hidden_state[0]  # type: ignore[operator, union-attr]
        return states

    @torch.inference_mode()
    def rows(self, states: Tensor, next_tokens: list[int]) -> Tensor:
        """The draft's states, of rows of the model's and the tokens behind them."""
        stored, tensors = self._stored, self._tensors
        embedded = tensors["model.embed_tokens.weight"][next_tokens]
        parts = (self._norm(stored.token_norm, embedded), self._norm(stored.state_norm, states))
        joined = torch.cat(parts, dim=-1) @ tensors[f"{stored.join}.weight"].T
        found: Tensor = self._layer.model(inputs_embeds=joined[None]).last_hidden_state[0]  # type: ignore[operator, union-attr]
        return found

    @torch.inference_mode()
    def guess(self, token_ids: list[int], count: int, chance_min: float = 0.0) -> list[int]:
        """`count` tokens that may follow these, as long as all of them are as likely as that."""
        states, tokens = self.read(token_ids[:-1]), list(token_ids[1:])
        guesses: list[int] = []
        chance = 1.0
        for _ in range(count):
            latest = self.rows(states, tokens)[-1:]
            logits: Tensor = self._target.lm_head(latest)  # type: ignore[operator]
            chance *= float(logits.softmax(dim=-1).max())
            if chance < chance_min:
                break
            guesses.append(int(logits[0].argmax()))
            states, tokens = torch.cat((states, latest)), [*tokens, guesses[-1]]
        return guesses

    def _norm(self, name: str, values: Tensor) -> Tensor:
        weight = self._tensors[f"{name}.weight"] + (1.0 if self._stored.has_offset else 0.0)
        return F.rms_norm(values, (values.shape[-1],), weight, self._epsilon)


def write_eagle3(target: Path, directory: Path, *, seed: int = 0, vocab_size: int = 0) -> Path:
    """A random head for a tiny checkpoint, as published. vocab_size: of its own head; 0 for that
    of the model, whose head it uses."""
    config = json.loads((target / "config.json").read_text())
    size, dim, count = config["hidden_size"], 16, config["vocab_size"]
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    tensors = {
        "fc.weight": draw(size, 3 * size),
        "midlayer.self_attn.q_proj.weight": draw(4 * dim, 2 * size),
        "midlayer.self_attn.k_proj.weight": draw(2 * dim, 2 * size),
        "midlayer.self_attn.v_proj.weight": draw(2 * dim, 2 * size),
        "midlayer.self_attn.o_proj.weight": draw(size, 4 * dim) * 2.0,
        "midlayer.mlp.gate_proj.weight": draw(96, size),
        "midlayer.mlp.up_proj.weight": draw(96, size),
        "midlayer.mlp.down_proj.weight": draw(size, 96),
    }
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{norm}.weight"] = torch.randn(size, generator=generator) * 0.15 + 1.0
    tensors["norm.weight"] = torch.randn(size, generator=generator) * 0.15 + 1.0
    if vocab_size:
        known = torch.randperm(count, generator=generator)[:vocab_size].sort().values
        tensors["d2t"] = known - torch.arange(vocab_size)
        tensors["t2d"] = torch.isin(torch.arange(count), known)
        tensors["lm_head.weight"] = draw(vocab_size, size)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    changes = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": dim,
        "intermediate_size": 96,
        "draft_vocab_size": vocab_size or None,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    kept = ("hidden_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "torch_dtype")
    head = {key: config[key] for key in kept if key in config} | changes
    head |= {"rope_theta": 10000.0, "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(head))
    return directory


class Eagle3Twin:
    """A head in float32, by its published definition: all rows are attended to again each time."""

    def __init__(self, target: Path, directory: Path) -> None:
        self._tensors = load_file(directory / "model.safetensors")
        self._config = json.loads((directory / "config.json").read_text())
        self._target = Reference.load(target).model

    @torch.inference_mode()
    def read(self, token_ids: list[int]) -> Tensor:
        """What it makes of what leaves three of the model's layers."""
        found: dict[int, Tensor] = {}
        hooks = [
            layer.register_forward_hook(lambda _, __, output, i=i: found.update({i: output}))
            for i, layer in enumerate(self._target.model.layers)  # type: ignore[union-attr, arg-type]
        ]
        self._target(torch.tensor([token_ids]))
        for hook in hooks:
            hook.remove()
        layers = self._config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        tapped = torch.cat([found[layer][0] for layer in layers], dim=-1)
        return tapped @ self._weight("fc").T

    @torch.inference_mode()
    def rows(self, states: Tensor, next_tokens: list[int]) -> Tensor:
        """The draft's states, of rows of its own and the tokens behind them."""
        weight = self._weight
        embedding: Tensor = self._target.model.embed_tokens.weight  # type: ignore[union-attr, assignment]
        embedded = self._norm("midlayer.input_layernorm", embedding[next_tokens])
        inputs = torch.cat((embedded, self._norm("midlayer.hidden_norm", states)), dim=-1)
        heads = {
            part: (inputs @ weight(f"midlayer.self_attn.{part}_proj").T)
            .view(len(inputs), -1, self._config["head_dim"])
            .transpose(0, 1)
            for part in "qkv"
        }
        query, key = self._turn(heads["q"]), self._turn(heads["k"])
        attended = F.scaled_dot_product_attention(
            query[None], key[None], heads["v"][None], is_causal=True, enable_gqa=True
        )
        output = attended[0].transpose(0, 1).reshape(len(inputs), -1)
        states = states + output @ weight("midlayer.self_attn.o_proj").T
        normed = self._norm("midlayer.post_attention_layernorm", states)
        gate = F.silu(normed @ weight("midlayer.mlp.gate_proj").T)
        inner = gate * (normed @ weight("midlayer.mlp.up_proj").T)
        return states + inner @ weight("midlayer.mlp.down_proj").T

    @torch.inference_mode()
    def guess(self, token_ids: list[int], count: int, chance_min: float = 0.0) -> list[int]:
        """`count` tokens that may follow these, as long as all of them are as likely as that."""
        states, tokens = self.read(token_ids[:-1]), list(token_ids[1:])
        guesses: list[int] = []
        chance = 1.0
        for _ in range(count):
            latest = self.rows(states, tokens)[-1:]
            normed = self._norm("norm", latest)
            if "lm_head.weight" in self._tensors:
                logits = normed @ self._weight("lm_head").T
            else:
                logits = self._target.lm_head(normed)  # type: ignore[operator]
            chance *= float(logits.softmax(dim=-1).max())
            if chance < chance_min:
                break
            best = int(logits.argmax())
            if "d2t" in self._tensors:
                best += int(self._tensors["d2t"][best])
            guesses.append(best)
            states, tokens = torch.cat((states, latest)), [*tokens, best]
        return guesses

    def _weight(self, name: str) -> Tensor:
        return self._tensors[f"{name}.weight"]

    def _norm(self, name: str, values: Tensor) -> Tensor:
        epsilon = self._config["rms_norm_eps"]
        return F.rms_norm(values, (values.shape[-1],), self._weight(name), epsilon)

    def _turn(self, heads: Tensor) -> Tensor:
        half = heads.shape[-1] // 2
        rates = self._config["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(heads.shape[1])[:, None] * rates
        first, second = heads[..., :half], heads[..., half:]
        return torch.cat(
            (
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
            ),
            dim=-1,
        )


def _last_chooser(directory: Path) -> int:
    """The layer whose choice of tokens the last one uses: itself, unless it shares another's."""
    config = json.loads((directory / "config.json").read_text())
    kinds = config.get("indexer_types", ["full"] * config["num_hidden_layers"])
    return max(layer for layer, kind in enumerate(kinds) if kind == "full")


def _layer_count(directory: Path) -> int:
    count: int = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    return count
