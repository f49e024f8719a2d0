"""Outputs follow their grammar whatever the logits say, alone, in a batch, and begun elsewhere."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from common.engine.sampling.draw import Sampled
from common.engine.sampling.grammar_table import GrammarTable
from common.engine.sampling.sampler import Sampler
from common.errors import GrammarError
from common.frontend.bodies.constraints import CHOICE_COUNT_MAX, read_choice
from common.frontend.bodies.fields import JsonValue
from common.frontend.text.tokenizer import load_tokenizer
from common.grammar import GrammarCompiler, GrammarState, lark_of
from common.request import Grammar, GrammarKind, SamplingParams
from common.request_bounds import GRAMMAR_LENGTH_MAX

CHECKPOINT = Path(__file__).parents[2] / "demo" / "checkpoint"
TOKENIZER = load_tokenizer(str(CHECKPOINT), lambda: 0.0)
VOCAB = TOKENIZER.vocab_size + 13  # models pad their vocabulary
EOS = TOKENIZER.encode("<|eos|>")[0]
OTHER_EOS = TOKENIZER.encode("<|pad|>")[0]
PROMPT = [5, 6, 7]
CPU = torch.device("cpu")
HANG_TIMEOUT_S = 30.0

PHONE = Grammar(GrammarKind.REGEX, r"\+[0-9]{2} [0-9]{3,8}")
PERSON = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 5},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "kind": {"enum": ["cat", "dog", "é"]},
                "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            },
            "required": ["name", "age", "kind", "tags"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        }
    ),
)

FLAGS = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"type": "boolean"}}},
            "required": ["a"],
            "additionalProperties": False,
        }
    ),
)
RULE_COUNT = 1500
# Every rule may begin with the same letter: the first step would have to follow all of them.
AMBIGUOUS = "\n".join(
    [
        f"start: {' | '.join(f'r{i}' for i in range(RULE_COUNT))}",
        *(f'r{i}: "a" r{(7 * i + 1) % RULE_COUNT} | "b"' for i in range(RULE_COUNT)),
    ]
)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(str(CHECKPOINT), VOCAB, [EOS, OTHER_EOS], thread_count=2)


def params(seed: int, grammar: Grammar | None, **changes: object) -> SamplingParams:
    values: dict[str, object] = {"max_new_tokens": 200, "seed": seed, "grammar": grammar, **changes}
    return SamplingParams(**values)  # type: ignore[arg-type]


def logits_at(position: int, row_count: int) -> Tensor:
    """The same for every row, as if all requests had the same text so far."""
    generator = torch.Generator().manual_seed(position)
    return (torch.randn((1, VOCAB), generator=generator) * 3).repeat(row_count, 1)


def step(sampler: Sampler, slots: list[int], position: int) -> Sampled:
    positions = np.full(len(slots), position, dtype=np.int64)
    return sampler.sample(logits_at(position, len(slots)), np.array(slots), positions)


def run(
    compiler: GrammarCompiler, requests: list[SamplingParams], *, given: list[int] | None = None
) -> list[list[int]]:
    """Outputs of requests that run as one batch, each up to its end, which is left out."""
    outputs = [list(given or []) for _ in requests]
    sampler = Sampler(VOCAB, [EOS, OTHER_EOS], CPU, compiler)
    for slot, request in enumerate(requests):
        tokens = torch.tensor(PROMPT + outputs[slot])
        sampler.add(slot, request, tokens, len(PROMPT))
    running = list(range(len(requests)))
    first = len(PROMPT) + len(outputs[0])
    for position in range(first, len(PROMPT) + 200):
        sampled = step(sampler, running, position)
        assert not sampled.failed
        for slot, token in zip(list(running), sampled.token_ids, strict=True):
            if token in (EOS, OTHER_EOS):
                sampler.remove(slot)
                running.remove(slot)
            else:
                outputs[slot].append(token)
        if not running:
            return outputs
    raise AssertionError(f"{len(running)} of {len(requests)} never ended")


def test_json_follows_its_schema_whatever_the_logits_say(compiler: GrammarCompiler) -> None:
    outputs = run(compiler, [params(seed, PERSON) for seed in range(40)])
    texts = [TOKENIZER.decode(output) for output in outputs]
    for text in texts:
        person = json.loads(text)
        assert list(person) == ["name", "age", "kind", "tags"]
        assert len(person["name"]) <= 5
        assert 0 <= person["age"] <= 120
        assert person["kind"] in ("cat", "dog", "é")
        assert len(person["tags"]) <= 3
        assert set(person["tags"]) <= {True, False}
    assert len(set(texts)) > 30


@pytest.mark.parametrize("length", [1, 55])
def test_as_many_choices_as_are_taken_can_be_followed(
    compiler: GrammarCompiler, length: int
) -> None:
    choices: list[JsonValue] = [f"{i}{'x' * (length - 1)}" for i in range(CHOICE_COUNT_MAX)]
    grammar = read_choice(choices, "guided_choice")
    outputs = run(compiler, [params(seed, grammar) for seed in range(20)])
    texts = {TOKENIZER.decode(output) for output in outputs}
    assert texts <= set(choices) and len(texts) > 5


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}, {"logit_bias": {9: 50}}],
    ids=str,
)
def test_every_way_of_drawing_follows_the_grammar(
    compiler: GrammarCompiler, sampling: dict[str, object]
) -> None:
    outputs = run(compiler, [params(seed, PHONE, **sampling) for seed in range(4)])
    for output in outputs:
        assert re.fullmatch(PHONE.text, TOKENIZER.decode(output))


def test_a_grammar_leaves_its_neighbours_alone(compiler: GrammarCompiler) -> None:
    free = [params(seed, None) for seed in range(3)]
    apart, together = Sampler(VOCAB, [EOS], CPU), Sampler(VOCAB, [EOS], CPU, compiler)
    for slot, request in enumerate([*free, params(9, PHONE), params(8, PHONE)]):
        together.add(slot, request, torch.tensor(PROMPT), len(PROMPT))
        if request.grammar is None:
            apart.add(slot, request, torch.tensor(PROMPT), len(PROMPT))
    mixed = step(together, [3, 0, 4, 1, 2], len(PROMPT)).token_ids
    first, second = mixed.pop(0), mixed.pop(1)
    assert mixed == step(apart, [0, 1, 2], len(PROMPT)).token_ids
    assert TOKENIZER.decode([first, second]) == "++"


def test_draws_that_are_launched_ahead_follow_the_grammar(compiler: GrammarCompiler) -> None:
    requests = [params(1, PHONE), params(2, PERSON), params(3, None)]
    sampler = Sampler(VOCAB, [EOS, OTHER_EOS], CPU, compiler)
    for slot, request in enumerate(requests):
        sampler.add(slot, request, torch.tensor(PROMPT), len(PROMPT))
    slots = np.arange(3)
    places = [np.full(3, len(PROMPT) + count) for count in range(12)]
    draws = [sampler.draw(logits_at(int(at[0]), 3), slots, at) for at in places]
    rows = list(zip(*(draw.finish().token_ids for draw in draws), strict=True))
    for row, expected in zip(rows, run(compiler, requests[:2]), strict=False):
        assert list(row[: len(expected)]) == expected[:12]


def test_the_next_owner_of_a_slot_does_not_take_a_token_that_was_not_looked_at(
    compiler: GrammarCompiler,
) -> None:
    sampler = Sampler(VOCAB, [EOS], CPU, compiler)
    sampler.add(0, params(0, PHONE), torch.tensor(PROMPT), len(PROMPT))
    place = np.full(1, len(PROMPT))
    launched = sampler.draw(logits_at(1, 1), np.array([0]), place)
    sampler.remove(0)
    sampler.add(0, params(0, FLAGS), torch.tensor(PROMPT), len(PROMPT))
    second = sampler.draw(logits_at(2, 1), np.array([0]), place).finish()
    assert not second.failed
    texts = [TOKENIZER.decode(one.token_ids) for one in (launched.finish(), second)]
    assert texts[0] == "+" and texts[1].startswith("{")


def test_an_output_that_was_begun_elsewhere_goes_on_as_it_would_have(
    compiler: GrammarCompiler,
) -> None:
    request = params(3, PERSON)
    (whole,) = run(compiler, [request])
    for count in range(1, len(whole), 7):
        assert run(compiler, [request], given=whole[:count]) == [whole]


def test_an_output_that_broke_its_grammar_elsewhere_fails_alone(compiler: GrammarCompiler) -> None:
    sampler = Sampler(VOCAB, [EOS], CPU, compiler)
    sampler.add(0, params(0, PHONE), torch.tensor([*PROMPT, *TOKENIZER.encode("x")]), len(PROMPT))
    sampler.add(1, params(0, PHONE), torch.tensor([*PROMPT, *TOKENIZER.encode("+")]), len(PROMPT))
    sampled = step(sampler, [0, 1], len(PROMPT) + 1)
    assert list(sampled.failed) == [0] and sampled.unfit == {0}
    assert "grammar" in sampled.failed[0]
    assert TOKENIZER.decode(sampled.token_ids[1:]).isdigit()


def test_the_end_comes_with_the_grammars_even_if_more_was_asked_for(
    compiler: GrammarCompiler,
) -> None:
    digit = Grammar(GrammarKind.REGEX, "[0-9]")
    sampler = Sampler(VOCAB, [EOS], CPU, compiler)
    sampler.add(0, params(0, digit, min_new_tokens=9), torch.tensor(PROMPT), len(PROMPT))
    drawn = [step(sampler, [0], len(PROMPT) + i) for i in range(4)]
    assert [sampled.failed for sampled in drawn] == [{}] * 4
    assert TOKENIZER.decode(drawn[0].token_ids).isdigit()
    assert {token for sampled in drawn[1:] for token in sampled.token_ids} <= {EOS, OTHER_EOS}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, "(a"),
        (GrammarKind.REGEX, "(?=a)b"),
        (GrammarKind.LARK, "start: missing"),
        (GrammarKind.JSON_SCHEMA, '{"type": "objectt"}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#/nowhere"}'),
        (GrammarKind.JSON_SCHEMA, "[1]"),
        (GrammarKind.JSON_SCHEMA, '{"anyOf":[' * 500 + "{}" + "]}" * 500),
        (GrammarKind.REGEX, "a" * (GRAMMAR_LENGTH_MAX + 1)),
        (GrammarKind.LARK, AMBIGUOUS),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cant_be_compiled_is_said_in_short(
    compiler: GrammarCompiler, kind: GrammarKind, text: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.start(Grammar(kind, text))
    assert 0 < len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"a": [true, false]}', True),
        (json.dumps({"a": [True]}, indent=4), True),
        ('{"a":[true]}', True),
        ('{"a":  [true]}', False),
        ('{"a":\n\n[true]}', False),
    ],
)
def test_json_is_written_on_one_line_or_indented(
    compiler: GrammarCompiler, text: str, is_allowed: bool
) -> None:
    tokens = TOKENIZER.encode(text)
    if is_allowed:
        assert compiler.start(FLAGS, tokens).is_complete
    else:
        with pytest.raises(GrammarError):
            compiler.start(FLAGS, tokens)


def test_gbnf_and_lark_are_both_read(compiler: GrammarCompiler) -> None:
    gbnf = 'root ::= greeting " " [a-z]{3}\ngreeting ::= "hi" | "hello"'
    lark = 'start: ("hi" | "hello") " " /[a-z]{3}/'
    for text in (gbnf, lark):
        (output,) = run(compiler, [params(1, Grammar(GrammarKind.LARK, lark_of(text)))])
        assert re.fullmatch(r"(hi|hello) [a-z]{3}", TOKENIZER.decode(output))
    with pytest.raises(GrammarError):
        lark_of('root ::= "never closed')


class HeldCompiler(GrammarCompiler):
    """Compiles nothing before `go` is set. started: grammars in order."""

    def __init__(self) -> None:
        super().__init__(str(CHECKPOINT), VOCAB, [EOS, OTHER_EOS], 1)
        self.go = threading.Event()
        self.started: list[Grammar] = []

    def start(self, grammar: Grammar, output_ids: Sequence[int] = ()) -> GrammarState:
        assert self.go.wait(HANG_TIMEOUT_S)
        self.started.append(grammar)
        return super().start(grammar, output_ids)


def test_a_grammar_whose_slot_has_another_one_by_now_is_not_compiled() -> None:
    compiler = HeldCompiler()
    table = GrammarTable(compiler, VOCAB, CPU)
    table.add(0, PHONE, ())
    table.add(1, FLAGS, ())
    table.remove(1)
    table.add(1, PERSON, ())
    compiler.go.set()
    assert not table.is_complete(1)
    assert compiler.started == [PHONE, PERSON]


def test_a_tokenizer_that_cant_be_read_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(GrammarError, match="tokenizer"):
        GrammarCompiler(str(tmp_path), VOCAB, [EOS], thread_count=1).start(PHONE)
    with pytest.raises(GrammarError, match="tokenizer"):
        GrammarCompiler(str(CHECKPOINT), 10, [EOS], thread_count=1).start(PHONE)
