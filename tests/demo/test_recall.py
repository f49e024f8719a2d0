"""The committed demo checkpoint answers from its context, and only from its context."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from demo.facts import Ask, Question, is_right, make_question
from demo.score import answer_texts, load, pages_of_fact, score

CHECKPOINT = Path(__file__).parents[2] / "demo" / "checkpoint"
CHECKPOINT_NBYTES_MAX = 8 << 20
HELD_OUT_SEED = 10_000

Demo = tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    thread_count = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are too small to be worth sharing
    yield load(CHECKPOINT)
    torch.set_num_threads(thread_count)


def held_out(fact_count: int, count: int) -> list[Question]:
    return [make_question(HELD_OUT_SEED + index, fact_count) for index in range(count)]


def test_checkpoint_fits_in_the_repository() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= CHECKPOINT_NBYTES_MAX


@pytest.mark.slow
@pytest.mark.parametrize("fact_count", [4, 24, 64])
def test_held_out_questions_are_answered(demo: Demo, fact_count: int) -> None:
    questions = held_out(fact_count, 32)
    assert score(questions, answer_texts(*demo, questions)) >= 0.95


@pytest.mark.slow
def test_bfloat16_answers_too() -> None:
    questions = held_out(24, 32)
    assert score(questions, answer_texts(*load(CHECKPOINT, torch.bfloat16), questions)) >= 0.95


@pytest.mark.slow
def test_losing_the_pages_of_the_fact_loses_the_answer(demo: Demo) -> None:
    questions = held_out(24, 32)
    lost_pages = [pages_of_fact(demo[1], question) for question in questions]
    assert score(questions, answer_texts(*demo, questions, lost_pages)) <= 0.1


@pytest.mark.slow
def test_every_page_of_a_recital_matters(demo: Demo) -> None:
    question = make_question(HELD_OUT_SEED, 10, ask=Ask.ALL)
    assert answer_texts(*demo, [question]) == [question.answer]
    pages = pages_of_fact(demo[1], question)
    texts = answer_texts(*demo, [question] * len(pages), [[page] for page in pages])
    assert not any(is_right(question, text) for text in texts)


@pytest.mark.slow
def test_a_chat_answers_each_turn(demo: Demo) -> None:
    model, tokenizer = demo
    first = make_question(HELD_OUT_SEED, 20, fact_index=3)
    second = make_question(HELD_OUT_SEED, 20, fact_index=11)
    asked_again = second.chat[second.chat.index("Question:") :]
    messages = [
        {"role": "user", "content": first.chat},
        {"role": "assistant", "content": first.answer.strip()},
        {"role": "user", "content": asked_again},
    ]
    for turns, question in ((messages[:1], first), (messages, second)):
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        asked = Question(str(prompt), question.answer, 0, 0)
        assert answer_texts(model, tokenizer, [asked]) == [question.answer]


def test_a_chat_question_reads_like_a_plain_one(demo: Demo) -> None:
    question = make_question(1, 4)
    for content in (question.chat, question.prompt):
        messages = [{"role": "user", "content": content}]
        text = demo[1].apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert text == question.prompt


def test_any_text_survives_the_tokenizer(demo: Demo) -> None:
    rng = random.Random(0)
    drawn = "".join(chr(rng.randrange(0x20, 0xD800)) for _ in range(200))
    for text in ("", " ", "Mara keeps\tnothing.\r\n", "naïve 漢字 🙂", "\x00", drawn):
        assert demo[1].decode(demo[1](text).input_ids) == text
