"""Tiny random checkpoints of every supported architecture, and what transformers makes of them.

The weights are redrawn after initialisation: with the library's own small init a model repeats one
token, and nothing would show a wrong page. Importable by any test; costs some 50 ms per checkpoint.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.recipes import (
    compressed,
    delta,
    dense,
    gemma4,
    gpt_oss,
    kda,
    latent,
    lightning,
    mamba,
    sparse,
    windowed,
)
from tests.engine.recipes.latent import LATENT
from tests.engine.recipes.recipe import COMMON, VOCAB_SIZE, Classes, Recipe

__all__ = ["CLASSES", "LATENT", "RECIPES", "VOCAB_SIZE", "Change", "Recipe", "Reference"]

Change = Callable[[dict[str, Tensor]], None]
"""What a test does to the tensors of a checkpoint, by name."""

# One module per family. Seeds are picked: with the prompts of the tests, no output has fewer than
# 8 distinct tokens among 64, and the two best logits are never closer than 5e-4, many times the
# difference in fp32.
FAMILIES = (
    dense,
    latent,
    sparse,
    windowed,
    gemma4,
    compressed,
    gpt_oss,
    delta,
    kda,
    lightning,
    mamba,
)

CLASSES: Classes = {
    architecture: pair for family in FAMILIES for architecture, pair in family.CLASSES.items()
}
RECIPES: dict[str, Recipe] = {
    name: recipe for family in FAMILIES for name, recipe in family.RECIPES.items()
}


def build_checkpoint(
    recipe: Recipe, directory: Path, *, file_nbytes_max: int | None = None
) -> Path:
    """Write a checkpoint as transformers saves it. file_nbytes_max: cut into several files."""
    config_class, model_class = CLASSES[recipe.architecture]
    config = config_class.from_dict({**COMMON, **recipe.changes})
    torch.manual_seed(recipe.seed)
    model = model_class(config)
    redraw(model, recipe)
    model.save_pretrained(directory, max_shard_size=file_nbytes_max or "1GB")
    return directory


def redraw(model: torch.nn.Module, recipe: Recipe) -> None:
    """Weights with which every cached page decides tokens and few tokens repeat."""
    is_tied, norm_mean = recipe.is_tied, recipe.norm_mean
    generator = torch.Generator().manual_seed(recipe.seed)

    def draw(tensor: Tensor, mean: float, deviation: float) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * deviation + mean)

    with torch.no_grad():
        for name, tensor in model.named_parameters():
            fan_in = tensor.shape[-1] ** -0.5
            if recipe.draws_own is not None and recipe.draws_own(name, tensor, generator):
                continue
            if "embed_tokens" in name:
                draw(tensor, 0.0, 0.1 if is_tied else 1.0)
            elif tensor.dim() == 1:
                # What a Gemma layer adds has the size of its outer norms, not of its projections.
                is_outer = norm_mean == 0.0 and "post_" in name
                draw(tensor, 2.0 if is_outer else norm_mean if "norm" in name else 0.0, 0.15)
            elif "o_proj" in name:
                draw(tensor, 0.0, fan_in * (2.0 if is_tied else 3.0))
            elif "down_proj" in name:
                draw(tensor, 0.0, fan_in * (4.0 if is_tied else 1.5))
            elif "lm_head" in name:
                draw(tensor, 0.0, fan_in * 2.0)
            else:
                draw(tensor, 0.0, fan_in)
        for name, buffer in model.named_buffers():
            if recipe.draws_own is not None and recipe.draws_own(name, buffer, generator):
                continue
            if "e_score_correction_bias" in name:
                draw(buffer, 0.0, 0.15)


def respell_as_published(directory: Path) -> None:
    """Rewrite config.json as models on the hub have it: rope_theta, rope_scaling, torch_dtype."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["torch_dtype"] = config.pop("dtype")
    config["rope_scaling"] = None
    if rope["rope_type"] != "default":
        rope["type"] = rope.pop("rope_type")
        config["rope_scaling"] = rope
    path.write_text(json.dumps(config))


def edit_config(directory: Path, **changes: object) -> None:
    """Change members of config.json; None removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_tensors(directory: Path, change: Change) -> None:
    """Change the tensors of a checkpoint of one file."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def random_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


@dataclass(frozen=True)
class Reference:
    """transformers' answers for a checkpoint, in float32 on the CPU."""

    model: torch.nn.Module

    @staticmethod
    def load(directory: Path) -> Reference:
        architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: torch.nn.Module = CLASSES[architecture][1].from_pretrained(
                directory, dtype=torch.float32
            )
        return Reference(model.eval())

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """float32[tokens, vocabulary]."""
        logits: Tensor = self.model(torch.tensor([token_ids])).logits[0]
        return logits

    def continues(self, prompt: list[int], output: list[int]) -> list[int]:
        """The most likely token after the prompt and after each token of `output` but the last.

        Equal to `output` if and only if that is what `greedy` gives, in one forward pass.
        """
        logits = self.logits(prompt + output[:-1])
        tokens: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
        return tokens

    @torch.inference_mode()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The `count` most likely next tokens, ends of sentence included."""
        cache = None
        step = prompt
        output: list[int] = []
        for _ in range(count):
            result = self.model(torch.tensor([step]), past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            step = [int(result.logits[0, -1].argmax())]
            output += step
        return output
