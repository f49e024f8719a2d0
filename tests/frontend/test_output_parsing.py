"""What models say is told apart into text, reasoning and calls, however the text is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import output_formats as names
from common.frontend.text.parsing.choose import choose_parsers
from common.frontend.text.parsing.formats import CALL_FORMATS, REASONING_FORMATS
from common.frontend.text.parsing.items import Reasoning, ToolCall, joined
from common.frontend.text.parsing.literals import read_literal
from common.frontend.text.parsing.parsing import Beginning, OutputParser, Parsing, beginning
from tests.frontend.recorded_outputs import RECORDED, TOOLS, Recorded, Thought

# What a model may well say, and what no client could read as arguments or no server as a call.
ODD_CALLS = (
    '{"name": ["add"], "arguments": {}}',
    '{"name": {}, "arguments": {}}',
    '{"name": "add", "arguments": {"a": "\\ud800"}}',
    '{"name": "add", "arguments": {"a": NaN}}',
    '{"name": "add", "arguments": {"a": 1e999}}',
    '{"name": "add", "arguments": ' + "[" * 400 + "]" * 400 + "}",
)


def parsing(calls: str, reasoning: str, *, is_inside: bool = False) -> Parsing:
    found = choose_parsers(
        reasoning, calls, templates=(), architecture="", added_tokens={}, special_ids=set()
    )
    return Parsing(found.reasoning, found.calls, TOOLS, is_inside=is_inside)


def told(parser: OutputParser, pieces: Iterable[str]) -> list[object]:
    said = joined([item for piece in pieces for item in parser.push(piece)] + parser.flush())
    return [_plain(item) for item in said]


def _plain(item: object) -> object:
    match item:
        case ToolCall():
            return (item.name, json.loads(item.arguments))
        case Reasoning():
            return Thought(item.text)
        case _:
            return item


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    ends = [min(end, len(text)) for end in itertools.accumulate([*sizes, len(text) + 1])]
    return [text[start:end] for start, end in itertools.pairwise([0, *ends])]


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case.name)
def test_what_a_family_says_is_told_apart_however_it_is_cut(case: Recorded) -> None:
    form = parsing(case.calls, case.reasoning, is_inside=case.is_inside)
    for size in (1, 2, 3, 7, 11, len(case.text) + 1):
        pieces = [case.text[i : i + size] for i in range(0, len(case.text), size)]
        assert told(form.parser(), pieces) == list(case.said), size


MARKERS = sorted(
    {
        "<think>",
        "</think>",
        "[TOOL_CALLS]",
        "{",
        "}",
        '"',
        "name",
        "get_weather",
        "(",
        ")",
        "[",
        "]",
    }
    | {marker for form, _ in CALL_FORMATS.values() for marker in (*form.openings, *form.closings)}
)
PIECES = st.one_of(
    st.sampled_from(MARKERS),
    st.sampled_from([case.text for case in RECORDED]).flatmap(
        lambda text: st.integers(0, len(text)).map(lambda start: text[start : start + 25])
    ),
    st.text(alphabet=" \n<>|{}[]()'\",:=\\aé", max_size=4),
)


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["", *CALL_FORMATS])
@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(PIECES, max_size=12),
    sizes=st.lists(st.integers(1, 9), max_size=60),
    reasoning=st.sampled_from(["", *REASONING_FORMATS]),
    is_inside=st.booleans(),
)
def test_any_cut_of_any_text_tells_the_same(
    calls: str, parts: list[str], sizes: list[int], reasoning: str, is_inside: bool
) -> None:
    text = "".join(parts)
    form = parsing(calls, reasoning, is_inside=is_inside and bool(reasoning))
    parser, whole = form.parser(), form.parser()
    assert told(parser, cut(text, sizes)) == told(whole, [text])
    assert parser.spans == whole.spans


@pytest.mark.parametrize("said", ODD_CALLS, ids=range(len(ODD_CALLS)))
def test_what_can_not_be_told_as_a_call_is_text(said: str) -> None:
    tagged = f"<tool_call>{said}</tool_call>"
    assert told(parsing("hermes", "").parser(), [tagged]) == [tagged]
    assert told(parsing("llama3", "").parser(), [said]) == [said]


def test_text_before_a_call_is_shown_as_soon_as_it_is_certain() -> None:
    parser = parsing("hermes", "qwen3", is_inside=True).parser()
    assert parser.push("Hm") == [Reasoning("Hm")]
    assert parser.push(" so</thi") == [Reasoning(" so")]
    assert parser.push("nk>\n\nLook") == ["Look"]
    assert parser.push(" <tool") == []
    assert parser.push("box>") == [" <toolbox>"]


def test_listed_calls_come_as_they_are_complete_and_the_rest_is_text() -> None:
    oslo = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'
    parser = parsing("llama3", "").parser()
    (call,) = parser.push(f"{oslo} ")
    assert isinstance(call, ToolCall) and call.name == "get_weather"
    assert parser.push("as I") == [" as I"]
    assert parser.push(" said") == [" said"]
    for text in (oslo[:-1], '{"temperature": 3} is JSON'):
        assert told(parsing("llama3", "").parser(), [text]) == [text]


def test_calls_have_names_of_their_own_as_their_models_expect() -> None:
    call = '{"name": "now", "arguments": {}}'
    (one, other) = parsing("hermes", "").parser().push(f"<tool_call>{call}</tool_call>" * 2)
    assert isinstance(one, ToolCall) and isinstance(other, ToolCall)
    assert one.call_id.startswith("call_") and one.call_id != other.call_id
    parser = parsing("mistral", "").parser()
    (named,) = [*parser.push(f"[TOOL_CALLS][{call}]"), *parser.flush()]
    assert isinstance(named, ToolCall) and len(named.call_id) == 9 and named.call_id.isalnum()
    kimi = choose_parsers(
        "", "kimi_k2", templates=(), architecture="", added_tokens={}, special_ids=set()
    ).calls
    text = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    (counted,) = Parsing(calls=kimi, tools=TOOLS, call_count=2).parser().push(text)
    assert isinstance(counted, ToolCall) and counted.call_id == "functions.now:2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "part"),
    [
        ("hermes", "<tool_call>"), ("hermes", '<tool_call>{"'), ("hermes", "</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=rm>\n"), ("gpt-oss", "<|channel|>"),
        ("llama3", "<|python_tag|>"), ("kimi_k2", "<|tool_call_begin|>functions.now:0"),
    ],
)  # fmt: skip
def test_a_whole_output_of_markers_costs_a_step_for_each(calls: str, part: str) -> None:
    """Quadratic work would take minutes here."""
    text = part * 30_000
    said = told(parsing(calls, "").parser(), [text])
    assert all(isinstance(item, str) for item in said)


def test_reasoning_may_be_held_until_it_is_complete() -> None:
    form = REASONING_FORMATS["qwen3"][0]
    parser = Parsing(form, is_inside=True, holds_reasoning=True).parser()
    assert parser.push("One. ") == [] == parser.push("Two.")
    assert parser.push("</think>3") == [Reasoning("One. Two."), "3"]
    cut_off = Parsing(form, is_inside=True, holds_reasoning=True).parser()
    assert [*cut_off.push("One."), *cut_off.flush()] == [Reasoning("One.")]


def test_spans_are_where_reasoning_stands() -> None:
    parser = parsing("", "gpt-oss").parser()
    text = "<|channel|>analysis<|message|>A<|end|>"
    parser.push(text + "<|start|>assistant<|channel|>analysis<|message|>B")
    assert parser.spans == [(0, len(text)), (len(text) + len("<|start|>assistant"), -1)]


# ---- choice --------------------------------------------------------------------------------------


def test_every_name_has_a_format() -> None:
    assert set(names.TOOL_FORMATS) == set(CALL_FORMATS)
    assert set(names.REASONING_FORMATS) == set(REASONING_FORMATS)
    for table in (names.TOOL_FORMATS, names.REASONING_FORMATS):
        every = names.all_names(table)
        assert len(set(every)) == len(every)
        assert all(names.format_of(name, table) in table for name in every if name != names.AUTO)


@pytest.mark.parametrize(
    ("template", "architecture", "calls", "reasoning"),
    [
        ('<tool_call>\\n{"name": ... <think>\\n\\n</think>', "Qwen3ForCausalLM", "hermes", "qwen3"),
        ("<tool_call>\n<function=a>\n<parameter=b> </think>", "", "qwen3_coder", "qwen3"),
        ("<tool_call>{function-name}<arg_key>{a}</arg_key> </think>", "", "glm45", "qwen3"),
        ("'<｜tool▁calls▁begin｜>' '```json' </think>", "", "deepseekv3", "qwen3"),
        ("'<｜tool▁calls▁begin｜>' </think>", "", "deepseekv31", "qwen3"),
        ("<|tool_call_begin|>", "", "kimi_k2", ""),
        ("<|start|> <|channel|>analysis<|message|> <|call|>", "", "gpt-oss", "gpt-oss"),
        ("[TOOL_CALLS] [THINK]", "", "mistral", "mistral"),
        ("<TOOLCALL>[ </think>", "", "nemotron_json", "qwen3"),
        ("<|tool_call>call: <|channel>thought", "", "gemma4", "gemma4"),
        ('format {"name": function name, "parameters": dict}', "", "llama3", ""),
        ("[func_name1(params_name1=params_value1)]", "", "pythonic", ""),
        ("{{ messages[0].content }}", "DeepseekV32ForCausalLM", "", ""),
        ("", "DeepseekV32ForCausalLM", "deepseekv32", "qwen3"),
        ("", "DeepseekV4ForCausalLM", "deepseekv32", "qwen3"),
        ("", "LlamaForCausalLM", "", ""),
    ],
)
def test_auto_follows_the_template_else_the_architecture(
    template: str, architecture: str, calls: str, reasoning: str
) -> None:
    templates = (template,) if template else ()
    found = choose_parsers(
        "auto",
        "auto",
        templates=templates,
        architecture=architecture,
        added_tokens={},
        special_ids=set(),
    )
    assert found.calls == (CALL_FORMATS[calls][0] if calls else None)
    assert found.reasoning == (REASONING_FORMATS[reasoning][0] if reasoning else None)


def test_tokens_of_a_format_are_shown_and_named_and_no_others() -> None:
    added = {"<|tool_call_begin|>": 5, "</think>": 6, "<|im_end|>": 7, "<b>": 8, "word": 9}
    found = choose_parsers(
        "kimi_k2",
        "kimi_k2",
        templates=(),
        architecture="",
        added_tokens=added,
        special_ids={5, 7},
    )
    assert found.shown_ids == {5}
    assert found.tokens.markers == {"<|tool_call_begin|>": 5, "</think>": 6}
    assert found.tokens.texts == {"</think>": 6, "<b>": 8}


@pytest.mark.parametrize(
    ("name", "prompt", "continued", "expected"),
    [
        ("qwen3", "...<|im_start|>assistant\n", None, Beginning.BEFORE),
        ("qwen3", "...<|im_start|>assistant\n<think>\n", None, Beginning.INSIDE),
        ("qwen3", "...assistant\n<think>\n\n</think>\n\n", None, Beginning.BEHIND),
        ("qwen3", "what is <think>?\n", None, Beginning.BEFORE),
        ("qwen3", "...", "<think>I was", Beginning.INSIDE),
        ("qwen3", "...", "<think>I was</think>It is", Beginning.BEHIND),
        ("deepseek-r1", "<｜Assistant｜>", None, Beginning.INSIDE),
        ("deepseek-r1", "<｜Assistant｜></think>", None, Beginning.BEHIND),
        ("", "<think>", None, Beginning.BEHIND),
    ],
)
def test_the_prompt_says_where_an_output_begins(
    name: str, prompt: str, continued: str | None, expected: Beginning
) -> None:
    form = REASONING_FORMATS[name][0] if name else None
    assert beginning(form, prompt, continued) is expected


# ---- literals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-1.5e3", -1500.0), ("[1, 'a', (2, 3), (4), None]", [1, "a", [2, 3], 4, None]),
        ("{'a': {\"b\": True}, }", {"a": {"b": True}}), (r"'it\'s\n\u00e9\q'", "it's\né" + r"q"),
        ("()", []), ("{}", {}),
    ],
)  # fmt: skip
def test_literals_are_read_as_python_has_them(text: str, value: object) -> None:
    assert read_literal(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "[1 2]", "a", "[" * 100 + "]" * 100, "1" * 5000, "'a", "{'a' 1}", "f(1)", "1 2", "--1"],
)
def test_what_is_no_literal_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_literal(text)
