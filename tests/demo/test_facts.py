"""Demo prompts are the same everywhere, well formed, and judged strictly."""

import pytest

from demo.facts import Ask, is_right, make_question

PINNED_PROMPT = (
    "Facts: Selma keeps the flat shield. Jonas keeps the coral ring. "
    "Question: what does Jonas keep? Answer:"
)


def test_a_question_is_fixed_by_its_arguments() -> None:
    assert make_question(7, 3) == make_question(7, 3)
    assert make_question(7, 3) != make_question(8, 3)
    assert make_question(0, 2).prompt == PINNED_PROMPT


def test_the_fact_is_where_the_question_says() -> None:
    for seed in range(50):
        question = make_question(seed, 12)
        fact = question.prompt[question.fact_start : question.fact_end]
        name = fact.split()[0]
        assert fact == f"{name} keeps{question.answer}"
        assert question.prompt.endswith(f" Question: what does {name} keep? Answer:")
        assert question.prompt.count(f"{name} keeps") == 1


def test_a_recital_holds_every_fact() -> None:
    question = make_question(3, 12, ask=Ask.ALL)
    assert question.answer.count(" keeps the ") == 12
    assert question.prompt[question.fact_start : question.fact_end] == question.answer[1:]


def test_only_the_whole_answer_is_right() -> None:
    question = make_question(5, 8)
    assert is_right(question, question.answer)
    assert is_right(question, question.answer.strip() + "\n")
    assert not is_right(question, "")
    assert not is_right(question, question.answer.strip().removesuffix("."))
    assert not is_right(question, question.answer + " And more.")


@pytest.mark.parametrize("fact_count", [-1, 0, 1000])
def test_an_impossible_list_is_refused(fact_count: int) -> None:
    with pytest.raises(ValueError, match=f"fact_count={fact_count}"):
        make_question(0, fact_count)


@pytest.mark.parametrize("fact_index", [-1, 4])
def test_a_fact_outside_the_list_is_refused(fact_index: int) -> None:
    with pytest.raises(ValueError, match=f"fact_index={fact_index}"):
        make_question(0, 4, fact_index=fact_index)
