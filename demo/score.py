"""Scores a demo checkpoint on questions it was not trained on, with transformers alone.

    python -m demo.score --checkpoint demo/checkpoint

Greedy decoding on one device, and split as two servers do it: one model fills the cache and gives
the first token, the other goes on from the cache. A page of the cache can be lost in between.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import DynamicLayer

from demo.facts import Ask, Question, is_right, make_question

PAGE_TOKEN_COUNT: Final = 16
SPARE_TOKEN_COUNT: Final = 4
"""Tokens an answer may run over before it is cut: enough to see that it did not end."""
REPORT_FACT_COUNTS: Final = (2, 4, 8, 16, 24, 32, 40, 48, 56, 64)


def load(
    folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """The checkpoint in `folder`, ready to generate."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(model, Qwen3ForCausalLM)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return model, tokenizer


def answer_texts(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    lost_pages: Sequence[Sequence[int]] | None = None,
) -> list[str]:
    """Greedy answers, decoded, without their eos; an answer that does not end is cut.

    Args:
        questions: all of one prompt length, as those with the same number of facts are.
        lost_pages: for each question, indexes of the prompt's pages whose keys and values are
            zero by the time the second token is generated. None: nothing is lost.
    """
    rows = tokenizer([question.prompt for question in questions]).input_ids
    answer_length = max(len(tokenizer(question.answer).input_ids) for question in questions)
    cache = DynamicCache()
    tokens = torch.tensor(rows)
    generated: list[torch.Tensor] = []
    with torch.inference_mode():
        for _ in range(answer_length + SPARE_TOKEN_COUNT):
            logits = model(input_ids=tokens, past_key_values=cache, logits_to_keep=1).logits
            tokens = logits.argmax(-1)
            if not generated and lost_pages is not None:
                lose_pages(cache, lost_pages)
            generated.append(tokens)
    texts = []
    for row in torch.cat(generated, dim=1).tolist():
        end = row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else len(row)
        texts.append(str(tokenizer.decode(row[:end])))
    return texts


def lose_pages(cache: DynamicCache, lost_pages: Sequence[Sequence[int]]) -> None:
    """Zero the keys and values of pages of PAGE_TOKEN_COUNT tokens, in every layer."""
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None
        assert layer.values is not None
        for row, pages in enumerate(lost_pages):
            for page in pages:
                span = slice(page * PAGE_TOKEN_COUNT, (page + 1) * PAGE_TOKEN_COUNT)
                layer.keys[row, :, span] = 0  # [row][head][position][head_dim]
                layer.values[row, :, span] = 0


def pages_of_fact(tokenizer: PreTrainedTokenizerFast, question: Question) -> list[int]:
    """Indexes of the pages that hold a token of the asked-for fact, one or two for Ask.ONE."""
    offsets = tokenizer(question.prompt, return_offsets_mapping=True).offset_mapping
    positions = [
        position
        for position, (start, end) in enumerate(offsets)
        if start < question.fact_end and end > question.fact_start
    ]
    return sorted({position // PAGE_TOKEN_COUNT for position in positions})


def score(questions: Sequence[Question], texts: Sequence[str]) -> float:
    """Share of `texts` that answer their question, 0 to 1."""
    right = [is_right(question, text) for question, text in zip(questions, texts, strict=True)]
    return sum(right) / len(right)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.score", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=200, help="questions per row")
    parser.add_argument("--recitals", type=int, default=20, help="questions for all facts, per row")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    model, tokenizer = load(options.checkpoint, getattr(torch, options.dtype))
    print("facts, prompt tokens, right, right with the fact's pages lost, recitals right")
    for fact_count in REPORT_FACT_COUNTS:
        one = [make_question(seed, fact_count) for seed in range(options.questions)]
        everything = [
            make_question(seed, fact_count, ask=Ask.ALL) for seed in range(options.recitals)
        ]
        lost_pages = [pages_of_fact(tokenizer, question) for question in one]
        whole = score(one, answer_texts(model, tokenizer, one))
        lost = score(one, answer_texts(model, tokenizer, one, lost_pages))
        recital = score(everything, answer_texts(model, tokenizer, everything))
        length = len(tokenizer(one[0].prompt).input_ids)
        print(f"{fact_count:5} {length:5} {whole:6.3f} {lost:6.3f} {recital:6.3f}", flush=True)


if __name__ == "__main__":
    main()
