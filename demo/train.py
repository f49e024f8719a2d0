"""Trains the demo checkpoint from nothing and writes it in the published layout.

    python -m demo.train --output demo/checkpoint

One CPU core is enough. --seed fixes the data, their order and the first weights. The number of
facts in a lesson grows as soon as answers become right, so lookup is learned on short lists first.
"""

import argparse
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from demo.facts import FACT_COUNT_MAX, FACT_COUNT_MIN
from demo.lessons import make_lesson
from demo.model import make_config, make_model, write_checkpoint
from demo.tokenizer import EOS, PAD, build_tokenizer, token_id
from demo.words import ADJECTIVES, NAMES, OBJECTS

BATCH_TOKEN_COUNT: Final = 3072
"""Tokens in one step, padding included: four lessons of the longest kind."""
FACT_COUNT_FIRST: Final = 6
"""Longest list at the start; longer ones hide the signal before lookup is learned."""
GROW_ACCURACY: Final = 0.9
GROW_FACTOR: Final = 1.25
GROW_STEP_COUNT: Final = 10
"""Steps between two growths, so that the running accuracy has seen the longer lists."""
WARMUP_STEP_COUNT: Final = 50
REPORT_STEP_COUNT: Final = 100
NICENESS: Final = 10


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens: int64[lesson][position]. is_answer: bool, same shape, true where a token is part of
    an answer, its eos included."""

    tokens: torch.Tensor
    is_answer: torch.Tensor


class LessonStream:
    """Endless batches of lessons; owns the random state and the longest list allowed so far."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.fact_count_max = FACT_COUNT_FIRST
        self._tokenizer = tokenizer
        self._rng = random.Random(f"lessons {seed}")
        self._pad_id = token_id(tokenizer, PAD)
        self._eos_id = token_id(tokenizer, EOS)
        self._answer_id = token_id(tokenizer, " Answer")

    def grow(self) -> None:
        """Allow lists about a quarter longer."""
        grown = max(self.fact_count_max + 1, int(self.fact_count_max * GROW_FACTOR))
        self.fact_count_max = min(FACT_COUNT_MAX, grown)

    def draw_batch(self) -> Batch:
        """About BATCH_TOKEN_COUNT tokens of lessons that have the same number of facts."""
        fact_count = self._rng.randint(FACT_COUNT_MIN, self.fact_count_max)
        rows: list[list[int]] = []
        longest = 0
        while (len(rows) + 1) * longest <= BATCH_TOKEN_COUNT:
            rows.append(self._tokenizer.encode(make_lesson(self._rng, fact_count)).ids)
            longest = max(longest, len(rows[-1]))
        padded = [row + [self._pad_id] * (longest - len(row)) for row in rows]
        tokens = torch.tensor(padded, dtype=torch.int64)
        return Batch(tokens, self._mark_answers(tokens))

    def _mark_answers(self, tokens: torch.Tensor) -> torch.Tensor:
        """True from the second token after " Answer", past its colon, up to and with the eos.

        Loose words before the facts may hold " Answer" too. All the rest of such a lesson is then
        marked, its questions as well; the model learned in spite of it.
        """
        opened, closed = torch.zeros_like(tokens), torch.zeros_like(tokens)
        opened[:, 2:] = torch.eq(tokens[:, :-2], self._answer_id)
        closed[:, 1:] = torch.eq(tokens[:, :-1], self._eos_id)
        return torch.gt(opened.cumsum(1), closed.cumsum(1))


class Trainer:
    """Owns the model and its optimizers: Muon for matrices in layers, Adam for all the rest."""

    def __init__(self, tokenizer: Tokenizer, seed: int, lr: float) -> None:
        self.model = make_model(make_config(tokenizer), seed)
        named = list(self.model.named_parameters())
        matrices = [p for name, p in named if "layers." in name and p.ndim == 2]
        others = [p for name, p in named if "layers." not in name or p.ndim != 2]
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, lr=lr, weight_decay=0.0), lr),
            (torch.optim.AdamW(others, lr=lr / 5, betas=(0.9, 0.98), weight_decay=0.0), lr / 5),
        ]
        values = [token_id(tokenizer, f" {word}") for word in NAMES + ADJECTIVES + OBJECTS]
        self._values = torch.tensor(values)

    def apply_batch(self, batch: Batch, scale: float) -> tuple[float, float]:
        """One step at `scale` times the learning rates.

        Returns: mean cross-entropy of the answer tokens, in nats, and the share of the names,
        adjectives and objects among them that the model put first.
        """
        hidden = self.model.model(batch.tokens[:, :-1], use_cache=False).last_hidden_state
        wanted = batch.is_answer[:, 1:]
        logits = self.model.lm_head(hidden[wanted])
        targets = batch.tokens[:, 1:][wanted]
        loss = functional.cross_entropy(logits, targets)
        self.model.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, lr in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
            optimizer.step()
        is_value = torch.isin(targets, self._values)
        is_first = logits.argmax(-1) == targets
        return loss.item(), is_first[is_value].float().mean().item()


def plan_scales(step_count: int) -> Iterator[float]:
    """Learning-rate scale of each step: a short rise, level, then down to 0 over the last third."""
    for step in range(step_count):
        yield min(1.0, (step + 1) / WARMUP_STEP_COUNT, 3 * (step_count - step) / step_count)


def train(seed: int, step_count: int, lr: float) -> Qwen3ForCausalLM:
    """Train for `step_count` steps and report on stdout every REPORT_STEP_COUNT of them."""
    tokenizer = build_tokenizer()
    trainer = Trainer(tokenizer, seed, lr)
    stream = LessonStream(tokenizer, seed)
    started = time.monotonic()
    accuracy_recent, token_count = 0.0, 0
    for step, scale in enumerate(plan_scales(step_count), start=1):
        batch = stream.draw_batch()
        loss, accuracy = trainer.apply_batch(batch, scale)
        token_count += batch.tokens.numel()
        accuracy_recent = 0.9 * accuracy_recent + 0.1 * accuracy
        if step % GROW_STEP_COUNT == 0 and accuracy_recent > GROW_ACCURACY:
            stream.grow()
        if step % REPORT_STEP_COUNT == 0:
            print(
                f"step {step}/{step_count}: loss {loss:.4f}, values right {accuracy_recent:.4f}, "
                f"facts up to {stream.fact_count_max}, {token_count / 1e6:.1f}M tokens, "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
    return trainer.model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.train", description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    os.nice(NICENESS)
    torch.set_num_threads(options.threads)
    write_checkpoint(train(options.seed, options.steps, options.lr), options.output)


if __name__ == "__main__":
    main()
