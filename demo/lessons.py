"""Training text: a list of facts, then many questions about them with their answers.

One lesson reads as a chat of many turns under the demo chat template, so a single question and a
later turn of a chat are both among what is trained. Pure Python; knows no tokens and no model.
"""

import random
from typing import Final

from demo.facts import Fact, draw_facts
from demo.tokenizer import BOS, EOS
from demo.words import ADJECTIVES, FRAME, NAMES, OBJECTS

QUESTION_COUNT_MAX: Final = 24
BOS_SHARE: Final = 0.25
"""Share of lessons that start with the bos token, which callers may or may not send."""
NOISE_SHARE: Final = 0.3
NOISE_WORD_COUNT_MAX: Final = 96
"""Loose words before the facts, so that positions vary and other text does not distract."""
SEPARATORS: Final = (" ", " ", " ", "\n", "\n\n")
RECITAL_SHARE: Final = 0.4
"""Share of lessons that recite all facts."""

_LOOSE_WORDS: Final = NAMES + ADJECTIVES + OBJECTS + FRAME


def make_lesson(rng: random.Random, fact_count: int) -> str:
    """Text of one lesson: facts, then questions, each answered and closed by the eos token."""
    facts = draw_facts(rng, fact_count)
    listing = f"Facts: {' '.join(fact.text for fact in facts)}"
    head = _draw_head(rng) + listing + rng.choice(SEPARATORS)
    if rng.random() < RECITAL_SHARE:
        turns = [_turn("everyone", f" {listing.removeprefix('Facts: ')}")]
        turns += [_fact_turn(fact) for fact in rng.sample(facts, min(2, fact_count))]
        rng.shuffle(turns)
    else:
        question_count = min(QUESTION_COUNT_MAX, max(8, fact_count))
        turns = [_fact_turn(rng.choice(facts)) for _ in range(question_count)]
    return head + "\n".join(turns)


def _turn(asked: str, answer: str) -> str:
    return f"Question: what does {asked} keep? Answer:{answer}{EOS}"


def _fact_turn(fact: Fact) -> str:
    return _turn(fact.name, fact.answer)


def _draw_head(rng: random.Random) -> str:
    """The text before the facts, often empty."""
    bos = BOS if rng.random() < BOS_SHARE else ""
    if rng.random() >= NOISE_SHARE:
        return bos
    words = rng.choices(_LOOSE_WORDS, k=rng.randint(1, NOISE_WORD_COUNT_MAX))
    return f"{bos}{' '.join(words)}\n"
