"""Prompts whose right answers are known: a single server was asked first, greedily.

Where two tokens are almost equally likely, rounding decides, and rounding depends on what else is
in the batch; outputs are cut before such a place, so that another output is always a mistake. Next
turns are asked in a second round, as their prompts begin with right answers.
Knows nothing of pairs.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace

import httpx
import msgspec

from demo.facts import FACT_COUNT_MAX, Ask, make_question

PROMPT_TOKENS_MAX = 1500
VOCAB_SIZE = 1280
FIRST_PLAIN_TOKEN = 3  # below are the special tokens
# Far above fp32 rounding (1e-5) and far below what the model is sure of.
MARGIN_MIN = 1e-3
CONCURRENT_COUNT = 8
# What a next turn adds to the answer before it.
TURN_TOKENS_MAX = 20
# Around the page and chunk borders; the others are drawn.
BORDER_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 511, 512, 513, PROMPT_TOKENS_MAX)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text or token ids, and how many tokens are asked for."""

    content: str | list[int]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Golden:
    """finish: "stop" or "length". next_turn: whose prompt begins with this prompt and answer."""

    prompt: Prompt
    output_ids: list[int]
    text: str
    finish: str
    next_turn: Golden | None = None


class _Finish(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    output_top_logprobs: list[list[tuple[float, int, str | None]]] = []


class _Reply(msgspec.Struct):
    text: str
    output_ids: list[int]
    meta_info: _Meta


def draw_prompts(seed: int, count: int, output_tokens_max: int) -> list[Prompt]:
    """Questions about facts and random token ids, of 1..PROMPT_TOKENS_MAX tokens."""
    rng = random.Random(f"prompts {seed}")
    prompts: list[Prompt] = []
    long_ids: list[int] = [rng.randrange(FIRST_PLAIN_TOKEN, VOCAB_SIZE) for _ in range(1000)]
    for index in range(count):
        match index % 4:
            case 0:
                question = make_question(rng.getrandbits(32), rng.randint(2, FACT_COUNT_MAX))
                prompts.append(Prompt(question.prompt, 16))
            case 1:
                facts = rng.randint(2, max(2, output_tokens_max // 8))
                question = make_question(rng.getrandbits(32), facts, ask=Ask.ALL)
                prompts.append(Prompt(question.prompt, output_tokens_max))
            case 2:
                length = rng.randint(1, PROMPT_TOKENS_MAX)
                if index // 4 < len(BORDER_LENGTHS):
                    length = BORDER_LENGTHS[index // 4]
                ids = [rng.randrange(FIRST_PLAIN_TOKEN, VOCAB_SIZE) for _ in range(length)]
                prompts.append(Prompt(ids, rng.randint(1, output_tokens_max)))
            case _:
                # A beginning that others have too, which a prefix cache may know.
                tail = [rng.randrange(FIRST_PLAIN_TOKEN, VOCAB_SIZE) for _ in range(20)]
                ids = long_ids[: rng.randint(1, len(long_ids))] + tail
                prompts.append(Prompt(ids, rng.randint(1, output_tokens_max)))
    return prompts


def draw_next_prompts(seed: int, goldens: list[Golden], output_tokens_max: int) -> list[Prompt]:
    """Of the turn after each golden: its prompt, its answer, and a few tokens of another answer."""
    rng = random.Random(f"next prompts {seed}")
    texts = [golden.text for golden in goldens if isinstance(golden.prompt.content, str)]
    prompts: list[Prompt] = []
    for golden in goldens:
        count = rng.randint(1, TURN_TOKENS_MAX)
        content = golden.prompt.content
        if isinstance(content, str):
            content += golden.text + " " + " ".join(rng.choice(texts).split()[:count])
        else:
            content = [*content, *golden.output_ids, *rng.choice(goldens).output_ids[:count]]
        prompts.append(Prompt(content, rng.randint(1, output_tokens_max)))
    return prompts


async def take_conversations(
    url: str, prompts: list[Prompt], seed: int, output_tokens_max: int
) -> list[Golden]:
    """As `take_goldens`, each with its next turn if that has a sure first token."""
    goldens = await take_goldens(url, prompts)
    turns = await _take_all(url, draw_next_prompts(seed, goldens, output_tokens_max))
    return [replace(one, next_turn=turn) for one, turn in zip(goldens, turns, strict=True)]


async def take_goldens(url: str, prompts: list[Prompt]) -> list[Golden]:
    """Ask the server at `url`, which computes alone; in the order of `prompts`.

    A prompt whose very first token is a matter of rounding is left out.
    """
    return [golden for golden in await _take_all(url, prompts) if golden is not None]


async def _take_all(url: str, prompts: list[Prompt]) -> list[Golden | None]:
    turns = asyncio.Semaphore(CONCURRENT_COUNT)
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:

        async def take(prompt: Prompt) -> Golden | None:
            async with turns:
                return await _take(client, prompt)

        return await asyncio.gather(*(take(prompt) for prompt in prompts))


async def _take(client: httpx.AsyncClient, prompt: Prompt) -> Golden | None:
    reply = await _ask(client, prompt, has_logprobs=True)
    margins = [top[0][0] - top[1][0] for top in reply.meta_info.output_top_logprobs]
    assert len(margins) == len(reply.output_ids)
    sure_count = next((i for i, margin in enumerate(margins) if margin < MARGIN_MIN), len(margins))
    if sure_count == 0:
        return None
    if sure_count < len(margins):
        prompt = replace(prompt, max_new_tokens=sure_count)
        reply = await _ask(client, prompt, has_logprobs=False)
    return Golden(prompt, reply.output_ids, reply.text, reply.meta_info.finish_reason.type)


async def _ask(client: httpx.AsyncClient, prompt: Prompt, *, has_logprobs: bool) -> _Reply:
    body: dict[str, object] = {
        "text" if isinstance(prompt.content, str) else "input_ids": prompt.content,
        "sampling_params": {"temperature": 0, "max_new_tokens": prompt.max_new_tokens},
        "return_logprob": has_logprobs,
        "top_logprobs_num": 2 if has_logprobs else 0,
    }
    response = await client.post("/generate", json=body)
    response.raise_for_status()
    return msgspec.json.decode(response.content, type=_Reply)
