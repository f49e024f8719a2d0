"""Every architecture against transformers, through the paged cache, pages in random order."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.engine.cache.kv_pool import DTYPES
from common.engine.forward_batch import SequenceChunk
from common.engine.loader import load_model
from common.engine.models.causal_lm import CausalLm
from tests.engine.paged_decoding import (
    PAGE_SIZE,
    Sequence,
    forward,
    greedy,
    make_pool,
    shuffled_pages,
)
from tests.engine.tiny_checkpoints import (
    RECIPES,
    VOCAB_SIZE,
    Recipe,
    Reference,
    build_checkpoint,
    random_prompt,
    respell_as_published,
)

Checkpoints = Callable[[str], Path]

# One token, the ends of a page, and several chunks whose ends are no page ends.
PROMPT_CHUNKS = [
    [1],
    [PAGE_SIZE - 1],
    [PAGE_SIZE],
    [PAGE_SIZE + 1],
    [30, 18, 1, 28],
]
# Of logits up to 9. transformers in float32 is off its own float64 by up to 1e-4 for these models,
# and so are we, in other places; which CPU it is decides where.
LOGIT_ERROR_MAX = 3e-4
TOKEN_COUNT = 64
PAGE_COUNT = 48


def deal_sequences(seed: int) -> list[Sequence]:
    """A sequence per entry of PROMPT_CHUNKS, with room for its output."""
    pages = shuffled_pages(PAGE_COUNT, seed)
    sequences = []
    for index, chunks in enumerate(PROMPT_CHUNKS):
        count = -(-(sum(chunks) + TOKEN_COUNT) // PAGE_SIZE)
        owned, pages = pages[:count], pages[count:]
        sequences.append(Sequence(random_prompt(sum(chunks), index), owned))
    return sequences


def greedy_together(model: CausalLm) -> list[list[int]]:
    """Prompts chunk by chunk, first chunks of some beside later chunks of others, then decodes."""
    pool = make_pool(model, PAGE_COUNT)
    sequences = deal_sequences(seed=3)
    outputs: list[list[int]] = [[] for _ in sequences]
    pending = [list(chunks) for chunks in PROMPT_CHUNKS]
    while any(len(output) < TOKEN_COUNT for output in outputs):
        active = [i for i, output in enumerate(outputs) if len(output) < TOKEN_COUNT]
        chunks = []
        for i in active:
            if not pending[i]:
                sequences[i].token_ids.append(outputs[i][-1])
            chunks.append(sequences[i].chunk(pending[i].pop(0) if pending[i] else 1))
        for i, logits in zip(active, forward(model, pool, chunks), strict=True):
            if not pending[i]:
                outputs[i].append(int(logits.argmax()))
    return outputs


@pytest.mark.parametrize("name", RECIPES)
def test_logits_of_all_prompt_tokens_equal_transformers(
    name: str, tiny_checkpoint: Checkpoints
) -> None:
    model = load_model(tiny_checkpoint(name))
    reference = Reference.load(tiny_checkpoint(name))
    pool = make_pool(model, PAGE_COUNT)
    for sequence, chunks in zip(deal_sequences(seed=1), PROMPT_CHUNKS, strict=True):
        logits = torch.cat(
            [forward(model, pool, [sequence.chunk(size, all_logits=True)]) for size in chunks]
        )
        expected = reference.logits(sequence.token_ids)
        assert logits.dtype == torch.float32 and logits.shape[1] == VOCAB_SIZE
        torch.testing.assert_close(logits, expected, atol=LOGIT_ERROR_MAX, rtol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_greedy_tokens_of_a_mixed_batch_equal_transformers(
    name: str, tiny_checkpoint: Checkpoints
) -> None:
    reference = Reference.load(tiny_checkpoint(name))
    outputs = greedy_together(load_model(tiny_checkpoint(name)))
    for index, (chunks, output) in enumerate(zip(PROMPT_CHUNKS, outputs, strict=True)):
        assert len(output) == TOKEN_COUNT
        assert reference.continues(random_prompt(sum(chunks), index), output) == output
    assert min(len(set(output)) for output in outputs) >= 8, "the checkpoint repeats itself"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_sequence_alone_gives_the_tokens_it_gives_in_a_batch(
    name: str, tiny_checkpoint: Checkpoints
) -> None:
    model = load_model(tiny_checkpoint(name))
    together = greedy_together(model)
    for index in (0, 3, 4):
        sequence = deal_sequences(seed=9)[index]
        pool = make_pool(model, PAGE_COUNT)
        assert greedy(model, pool, sequence, PROMPT_CHUNKS[index], 24) == together[index][:24]


@pytest.mark.parametrize("name", ["llama_linear", "llama3", "qwen2_yarn", "qwen3_moe"])
def test_published_spelling_gives_the_same_logits(
    name: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    published = tmp_path / "published"
    shutil.copytree(tiny_checkpoint(name), published)
    respell_as_published(published)
    logits = []
    for path in (tiny_checkpoint(name), published):
        model = load_model(path)
        sequence = deal_sequences(seed=2)[4]
        logits.append(forward(model, make_pool(model, PAGE_COUNT), [sequence.chunk(77)]))
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_page_size_does_not_change_tokens(page_size: int, tiny_checkpoint: Checkpoints) -> None:
    model = load_model(tiny_checkpoint("qwen3"))
    prompt = random_prompt(37, 5)
    pool = make_pool(model, 128, page_size=page_size)
    output = greedy(model, pool, Sequence(prompt, shuffled_pages(128, 1)), [20, 17], 16)
    assert output == Reference.load(tiny_checkpoint("qwen3")).greedy(prompt, 16)


def test_layer_groups_do_not_change_tokens(tiny_checkpoint: Checkpoints) -> None:
    model = load_model(tiny_checkpoint("llama"))
    prompt = random_prompt(20, 5)
    outputs = [
        greedy(
            model,
            make_pool(model, 8, layer_group_count=count),
            Sequence(prompt, shuffled_pages(8, 1)),
            [20],
            16,
        )
        for count in (1, 2, 3)
    ]
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("page", range(3))
def test_every_cached_page_decides_logits(page: int, tiny_checkpoint: Checkpoints) -> None:
    model = load_model(tiny_checkpoint("llama"))
    prompt = random_prompt(48, 5)
    results = []
    for is_corrupt in (False, True):
        pool = make_pool(model, 8)
        sequence = Sequence([*prompt, 7], shuffled_pages(8, 1))
        forward(model, pool, [sequence.chunk(48)])
        if is_corrupt:
            pool.view("k", 1)[sequence.page_ids[page]].zero_()
        results.append(forward(model, pool, [sequence.chunk(1)]))
    assert (results[0] - results[1]).abs().max() > 0.01


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama3", "qwen2_tied", "qwen3_moe", "gpt_oss"])
def test_half_precision_stays_near_float32(
    name: str, dtype: str, tiny_checkpoint: Checkpoints
) -> None:
    """Logits are of order 8; the first token's must agree to a few roundings of the activations."""
    model = load_model(tiny_checkpoint(name), dtype=dtype)
    prompt = random_prompt(33, 6)
    pool = make_pool(model, 8)
    assert pool.view("k", 0).dtype == DTYPES[dtype]
    sequence = Sequence(prompt, shuffled_pages(8, 2))
    chunks = [sequence.chunk(20, all_logits=True), sequence.chunk(13, all_logits=True)]
    logits = torch.cat([forward(model, pool, [chunk]) for chunk in chunks])
    expected = Reference.load(tiny_checkpoint(name)).logits(prompt)
    assert logits.dtype == torch.float32
    # A router near a tie may send a token to another expert, which is no rounding any more; so the
    # typical difference is looked at, not the largest.
    assert (logits - expected).abs().median() < (0.1 if dtype == "bfloat16" else 0.02)


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_a_cache_of_less_precision_than_the_model_is_used_rounded(
    tiny_checkpoint: Checkpoints, cache_dtype: str
) -> None:
    model = load_model(tiny_checkpoint("llama"))
    results = []
    for sizes in ([33], [20, 13]):
        pool = make_pool(model, 8, kv_cache_dtype=cache_dtype)
        sequence = Sequence(random_prompt(33, 6), shuffled_pages(8, 2))
        for size in sizes:
            logits = forward(model, pool, [sequence.chunk(size)])
        results.append(logits)
    # A first chunk sees its own keys as the cache will hold them, so chunking changes nothing.
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=0.0)


def test_no_logits_asked_for_gives_none_of_the_rows(tiny_checkpoint: Checkpoints) -> None:
    model = load_model(tiny_checkpoint("llama"))
    pool = make_pool(model, 4)
    logits = forward(model, pool, [SequenceChunk([5, 6], 0, ([1],))])
    assert logits.shape == (0, VOCAB_SIZE)


def test_a_model_says_what_runs(tiny_checkpoint: Checkpoints) -> None:
    described = load_model(tiny_checkpoint("qwen3")).describe()
    assert described["architecture"] == "Qwen3ForCausalLM"
    assert described["attention"].startswith(("onednn", "sdpa"))
    assert described["layers"] == "0..2"


def test_head_count_that_is_no_power_of_two(tmp_path: Path) -> None:
    recipe = Recipe(
        "Qwen2ForCausalLM",
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 72},
    )
    build_checkpoint(recipe, tmp_path)
    model = load_model(tmp_path)
    sequence = Sequence(random_prompt(20, 1), shuffled_pages(4, 1))
    logits = forward(model, make_pool(model, 4), [sequence.chunk(20, all_logits=True)])
    expected = Reference.load(tmp_path).logits(sequence.token_ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)
