"""Trains an EAGLE-3 head for the demo checkpoint and writes it in the published layout.

    python -m demo.train_draft --checkpoint demo/checkpoint --output demo/draft_checkpoint

The model is frozen. The head learns what the model says two tokens ahead of the state that it
reads, then three and more ahead of it from its own states, as it is used.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from demo.draft import TAPPED, DraftHead, write_draft
from demo.facts import FACT_COUNT_MAX
from demo.tokenizer import build_tokenizer
from demo.train import NICENESS, REPORT_STEP_COUNT, Batch, LessonStream, plan_scales

DEPTH: Final = 4
"""Guesses in a row that are trained."""
DEPTH_WEIGHT: Final = 0.8
"""Of the loss of each guess, against that of the one before it."""


class DraftTrainer:
    """Owns the head and its optimizer."""

    def __init__(self, model: Qwen3ForCausalLM, seed: int, lr: float) -> None:
        self._model = model.requires_grad_(False)
        self.head = DraftHead(model.config, seed)
        self._lr = lr
        self._optimizer = torch.optim.AdamW(
            self.head.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0
        )

    def apply_batch(self, batch: Batch, scale: float) -> list[float]:
        """One step; the share of each depth's guesses, in answers, that are the model's word."""
        tapped, logits = self._read(batch.tokens)
        embedded = self._model.model.embed_tokens(batch.tokens)
        states = self.head.reduce(tapped)
        loss, shares = torch.zeros(()), list[float]()
        for depth in range(DEPTH):
            # Row i has the token at i + depth + 1, and says what the model says of the one behind.
            count = batch.tokens.shape[1] - depth - 1
            states = self.head(states[:, :count], embedded[:, depth + 1 :])
            wanted = batch.is_answer[:, depth + 1 :]
            guessed = self._model.lm_head(self.head.norm(states))[wanted]
            said = logits[:, depth + 1 :][wanted]
            loss = loss + DEPTH_WEIGHT**depth * functional.cross_entropy(guessed, said.softmax(-1))
            shares.append((guessed.argmax(-1) == said.argmax(-1)).float().mean().item())
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr * scale
        self._optimizer.step()
        return shares

    @torch.no_grad()
    def _read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What leaves the model's layers, [lesson, position, 3 * hidden], and its logits."""
        outputs: dict[int, Tensor] = {}
        hooks = [
            layer.register_forward_hook(lambda _, __, output, i=i: outputs.update({i: output}))
            for i, layer in enumerate(self._model.model.layers)
        ]
        logits = self._model(tokens, use_cache=False).logits
        for hook in hooks:
            hook.remove()
        return torch.cat([outputs[layer] for layer in TAPPED], dim=-1), logits


def train_draft(checkpoint: Path, seed: int, step_count: int, lr: float) -> DraftHead:
    """Train for `step_count` steps and report on stdout every REPORT_STEP_COUNT of them."""
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    trainer = DraftTrainer(model, seed, lr)
    stream = LessonStream(build_tokenizer(), seed + 1)
    stream.fact_count_max = FACT_COUNT_MAX
    started = time.monotonic()
    for step, scale in enumerate(plan_scales(step_count), start=1):
        shares = trainer.apply_batch(stream.draw_batch(), scale)
        if step % REPORT_STEP_COUNT == 0:
            print(
                f"step {step}/{step_count}: guesses right "
                f"{', '.join(f'{share:.3f}' for share in shares)}, "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
    return trainer.head


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.train_draft", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=280)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.004)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    os.nice(NICENESS)
    torch.set_num_threads(options.threads)
    write_draft(
        train_draft(options.checkpoint, options.seed, options.steps, options.lr), options.output
    )


if __name__ == "__main__":
    main()
