"""Prompts whose answer stands in the prompt alone: a list of facts, then a question about one.

    Facts: Mara keeps the copper key. Tobin keeps the glass lamp. Question: what does Mara keep?
    Answer: the copper key.

Names are paired with adjectives and objects at random, so the weights cannot know an answer: a
server answers right only if the KV of the fact reached it whole. Pure Python; knows no tokenizer
and no model. The same arguments give the same prompt in every process.
"""

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from demo.words import ADJECTIVES, NAMES, OBJECTS

FACT_COUNT_MIN: Final = 2
FACT_COUNT_MAX: Final = 64
"""The checkpoint is trained on FACT_COUNT_MIN..FACT_COUNT_MAX facts, both included."""

FACT_TOKEN_COUNT: Final = 6
"""Tokens in one fact under the demo tokenizer: name, keeps, the, adjective, object, period."""


class Ask(StrEnum):
    """The subject of a question: one fact or all."""

    ONE = "one"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt and the one text that answers it.

    `fact_start`, `fact_end`: half-open range of characters of `prompt` that holds the asked-for
    fact, or every fact for Ask.ALL. `answer` starts with the space that follows the prompt.
    """

    prompt: str
    answer: str
    fact_start: int
    fact_end: int

    @property
    def chat(self) -> str:
        """The prompt as a user's chat message; the chat template adds the " Answer:" again."""
        return self.prompt.removesuffix(" Answer:")


@dataclass(frozen=True, slots=True)
class Fact:
    """A name, and the object that it keeps."""

    name: str
    adjective: str
    object: str

    @property
    def text(self) -> str:
        return f"{self.name} keeps the {self.adjective} {self.object}."

    @property
    def answer(self) -> str:
        return f" the {self.adjective} {self.object}."


def make_question(
    seed: int, fact_count: int, *, fact_index: int | None = None, ask: Ask = Ask.ONE
) -> Question:
    """One question over `fact_count` facts, fixed by its arguments.

    Args:
        fact_index: which fact Ask.ONE asks for; drawn from the seed if None. Ask.ALL ignores it.
        ask: Ask.ONE for one fact (4 answer tokens), Ask.ALL for a recital of them all, in order
            (FACT_TOKEN_COUNT answer tokens a fact): a long answer that depends on every page.
    Raises: ValueError if `fact_count` or `fact_index` is out of range.
    """
    if not 1 <= fact_count <= len(NAMES):
        raise ValueError(f"fact_count={fact_count}: must be in 1..{len(NAMES)}")
    rng = random.Random(f"question {seed} {fact_count}")
    facts = draw_facts(rng, fact_count)
    drawn_index = rng.randrange(fact_count)
    index = drawn_index if fact_index is None else fact_index
    if not 0 <= index < fact_count:
        raise ValueError(f"fact_index={index}: must be in 0..{fact_count - 1}")

    listing = " ".join(fact.text for fact in facts)
    match ask:
        case Ask.ALL:
            start, length = len("Facts: "), len(listing)
            asked, answer = "everyone", " " + listing
        case Ask.ONE:
            start = len("Facts: ") + sum(len(fact.text) + 1 for fact in facts[:index])
            length = len(facts[index].text)
            asked, answer = facts[index].name, facts[index].answer
    prompt = f"Facts: {listing} Question: what does {asked} keep? Answer:"
    return Question(prompt, answer, start, start + length)


def is_right(question: Question, text: str) -> bool:
    """Whether `text`, decoded without special tokens, is the answer; outer whitespace is free."""
    return text.strip() == question.answer.strip()


def draw_facts(rng: random.Random, fact_count: int) -> list[Fact]:
    """Facts with distinct names; adjectives and objects may repeat, as a pair too."""
    return [
        Fact(name, rng.choice(ADJECTIVES), rng.choice(OBJECTS))
        for name in rng.sample(NAMES, fact_count)
    ]
