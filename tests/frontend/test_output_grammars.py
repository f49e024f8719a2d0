"""Answers behind reasoning and calls between markers are held to grammars, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken

from common.errors import GrammarError
from common.frontend.bodies.constraints import (
    Constraint,
    lark_grammar,
    read_choice,
    read_regex,
    schema_grammar,
)
from common.frontend.bodies.fields import JsonObject
from common.frontend.bodies.output_grammars import behind_reasoning, tagged_calls
from common.frontend.text.parsing.choose import choose_parsers
from common.frontend.text.parsing.formats import CALL_FORMATS, REASONING_FORMATS
from common.frontend.text.parsing.parsing import GrammarTokens
from common.frontend.text.tokenizer import load_tokenizer
from common.grammar import GrammarCompiler, is_token_of_grammars
from common.request import Grammar
from tests.frontend.tiny_tokenizers import byte_level_backend, write_tokenizer

CITY: JsonObject = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bonn"]}},
    "required": ["city"],
    "additionalProperties": False,
}
# Special in some checkpoints, plain text in others: a grammar has to name either.
SPECIAL = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>",
    "<|constrain|>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>",
)  # fmt: skip


class Checker:
    """A tokenizer with those tokens, special or not, and what a grammar allows of it."""

    def __init__(self, directory: Path, *, is_special: bool) -> None:
        backend = byte_level_backend()
        backend.add_tokens(
            [AddedToken(text, special=is_special, normalized=False) for text in SPECIAL]
        )
        path = str(write_tokenizer(directory, backend))
        self.tokenizer = load_tokenizer(path, lambda: 0.0)
        self._compiler = GrammarCompiler(path, self.tokenizer.vocab_size, [2], thread_count=1)

    def tokens(self, reasoning: str = "", calls: str = "") -> GrammarTokens:
        return choose_parsers(
            reasoning,
            calls,
            templates=(),
            architecture="",
            added_tokens=self.tokenizer.added_tokens,
            special_ids=self.tokenizer.special_ids,
        ).tokens

    def allows(self, grammar: Grammar, text: str) -> bool:
        """As a whole: the end may follow."""
        try:
            state = self._compiler.start(grammar, self.tokenizer.encode(text))
            state.advance(2)
        except GrammarError:
            return False
        return True


@pytest.fixture(scope="module", params=[True, False], ids=["special", "plain"])
def checker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checker:
    return Checker(tmp_path_factory.mktemp("tokenizer"), is_special=bool(request.param))


@pytest.mark.parametrize("is_special", [True, False])
def test_tokens_that_are_no_text_in_grammars_are_known(is_special: bool) -> None:
    backend = byte_level_backend()
    texts = ["<a>", "<｜tool▁sep｜>", "<a b>", "[X]", "|x|", "<|x", "x>", '<|"|>', "\n\n\n"]
    backend.add_tokens([AddedToken(t, special=is_special, normalized=False) for t in texts])
    theirs = LLTokenizer(backend.to_str())
    for text in texts:
        token_id = backend.token_to_id(text)
        assert token_id is not None
        expected = theirs.is_special_token(token_id)
        assert is_token_of_grammars(text, is_special=is_special) == expected, text


CONSTRAINTS: list[tuple[Grammar, str, str]] = [
    (schema_grammar(CITY, "f"), '{"city": "Oslo"}', '{"city": "Rome"}'),
    (read_regex(r"a/[0-9]+\n?", "f"), "a/12", "a12"),
    (read_choice(["yes", 'no "}'], "f"), 'no "}', "maybe"),
    (lark_grammar('start: "(" inner ")"\ninner: /[a-z]+/ # a word', "f"), "(ab)", "(1)"),
]


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
@pytest.mark.parametrize(("grammar", "good", "bad"), CONSTRAINTS)
def test_a_grammar_holds_for_the_answer_behind_reasoning(
    name: str, grammar: Grammar, good: str, bad: str, checker: Checker
) -> None:
    form = REASONING_FORMATS[name][0]
    tokens = checker.tokens(reasoning=name)
    asked = Constraint("f", grammar)
    inside = behind_reasoning(asked, form, tokens, is_inside=True).grammar
    before = behind_reasoning(asked, form, tokens, is_inside=False).grammar
    thought = f"Hm {{\n{bad}. {form.closing}"
    for gap in ("", "\n\n"):
        assert checker.allows(inside, f"{thought}{gap}{good}")
        assert checker.allows(before, f"\n{form.opening}{thought}{gap}{good}")
    assert checker.allows(before, good)
    for text in (f"{thought}{bad}", good, thought, f"{thought}{good}."):
        assert not checker.allows(inside, text), text
    for text in (f"{form.opening}{thought}{bad}", bad, f"{form.opening}Hm"):
        assert not checker.allows(before, text), text


def test_an_answer_of_a_channel_is_introduced_as_its_model_does(checker: Checker) -> None:
    form = REASONING_FORMATS["gpt-oss"][0]
    asked = Constraint("f", schema_grammar(CITY, "f"))
    tokens = checker.tokens(reasoning="gpt-oss")
    grammar = behind_reasoning(asked, form, tokens, is_inside=False).grammar
    thought = "<|channel|>analysis<|message|>Oslo.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    oslo = '{"city": "Oslo"}'
    assert checker.allows(grammar, f"{final}{oslo}")
    assert checker.allows(grammar, f"{thought}{final}{oslo}")
    assert not checker.allows(grammar, f"{thought}{oslo}")
    assert not checker.allows(grammar, f'{thought}{final}{{"city": "Rome"}}')


CALLED = {
    "hermes": '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
    "nemotron_json": '<TOOLCALL>[{{"name": "{name}", "arguments": {arguments}}}]</TOOLCALL>',
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0"
        "<|tool_call_argument_begin|>{arguments}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "deepseekv3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
        "{arguments}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseekv31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
}


@pytest.mark.parametrize("name", CALLED)
def test_strict_tools_are_held_where_arguments_are_json(name: str, checker: Checker) -> None:
    form = CALL_FORMATS[name][0]
    tokens = checker.tokens(calls=name)
    tools = [("find", CITY), ("free", {"type": "object"})]
    grammar = lark_grammar(tagged_calls(tools, form, tokens), "tools")

    def called(tool: str, arguments: JsonObject) -> str:
        return CALLED[name].format(name=tool, arguments=json.dumps(arguments))

    for text in (
        "It is < here.",
        called("find", {"city": "Oslo"}),
        f"I look. {called('free', {'a': [1]})}",
        f"{called('find', {'city': 'Bonn'})}\n{called('free', {})} so",
    ):
        assert checker.allows(grammar, text), text
    for text in (called("find", {"city": "Rome"}), called("rm", {}), called("find", {})):
        assert not checker.allows(grammar, text), text


def test_formats_that_can_be_held_are_those_that_are_tested() -> None:
    assert {name for name, (form, _) in CALL_FORMATS.items() if form.written} == set(CALLED)


@pytest.mark.parametrize("name", CALLED)
def test_strict_tools_are_held_behind_reasoning(name: str, checker: Checker) -> None:
    tokens = checker.tokens("qwen3", name)
    grammar = lark_grammar(tagged_calls([("find", CITY)], CALL_FORMATS[name][0], tokens), "tools")
    form = REASONING_FORMATS["qwen3"][0]
    held = behind_reasoning(Constraint("tools", grammar), form, tokens, is_inside=True).grammar
    good = CALLED[name].format(name="find", arguments='{"city": "Oslo"}')
    bad = CALLED[name].format(name="find", arguments='{"city": "Rome"}')
    assert checker.allows(held, f"Hm.</think>\n\nI look. {good}")
    assert checker.allows(held, "Hm.</think>It is 4.")
    assert not checker.allows(held, f"Hm.</think>\n\n{bad}")
