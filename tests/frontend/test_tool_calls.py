"""Calls of tools are found in what a model says, however the text is cut into pieces."""

from __future__ import annotations

import json

import pytest

from common.frontend.text.parsing.items import ToolCall, joined
from common.frontend.text.tool_calls import ToolFormat, tool_parser

NAMES = {"get_weather", "add"}
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}\\"]é"}]}}'
ADDED = ("add", {"a": 1, "b": [2, {"c": '}"]é'}]})
OSLO = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'
ASKED = ("get_weather", {"city": "Oslo"})
UNKNOWN = '{"name": "rm", "arguments": {}}'

CASES: list[tuple[ToolFormat, str, list[object]]] = [
    (ToolFormat.HERMES, f"<tool_call>\n{ADD}\n</tool_call>", [ADDED]),
    (
        ToolFormat.HERMES,
        f"I look.\n\n<tool_call>{ADD}</tool_call>\n<tool_call>\n{OSLO}</tool_call>\n",
        ["I look.", ADDED, ASKED],
    ),
    (ToolFormat.HERMES, f"<tool_call>{ADD}</tool_call> and so on", [ADDED, "and so on"]),
    (ToolFormat.HERMES, f"<tool_call>\n{ADD}", [ADDED]),
    (ToolFormat.HERMES, "a < b <tool is no tag  ", ["a < b <tool is no tag  "]),
    (ToolFormat.HERMES, "<tool_call>{not json</tool_call>", ["<tool_call>{not json</tool_call>"]),
    (
        ToolFormat.HERMES,
        f"x <tool_call>{UNKNOWN}</tool_call> y",
        [f"x <tool_call>{UNKNOWN}</tool_call> y"],
    ),
    (ToolFormat.HERMES, "", []),
    (ToolFormat.LLAMA3, f"  {OSLO}", [ASKED]),
    (ToolFormat.LLAMA3, f"{OSLO}; {ADD}", [ASKED, ADDED]),
    (ToolFormat.LLAMA3, "It is warm.", ["It is warm."]),
    (ToolFormat.LLAMA3, '{"temperature": 3} is JSON', ['{"temperature": 3} is JSON']),
    (ToolFormat.LLAMA3, OSLO[:-1], [OSLO[:-1]]),
    (ToolFormat.LLAMA3, f"{OSLO} as I said", [ASKED, " as I said"]),
    (ToolFormat.LIST, f"[{ADD}, {OSLO}]", [ADDED, ASKED]),
    (ToolFormat.LIST, f"[{ADD}, {OSLO[:9]}", [ADDED, f", {OSLO[:9]}"]),
]


# What a model may well say, and what no client could read as arguments or no server as a call.
ODD_CALLS = (
    '{"name": ["add"], "arguments": {}}',
    '{"name": {}, "arguments": {}}',
    '{"name": "add", "arguments": {"a": "\\ud800"}}',
    '{"name": "add", "arguments": {"a": NaN}}',
    '{"name": "add", "arguments": {"a": 1e999}}',
    '{"name": "add", "arguments": ' + "[" * 400 + "]" * 400 + "}",
)


def told(tool_format: ToolFormat, pieces: list[str]) -> list[object]:
    parser = tool_parser(tool_format, NAMES)
    said = joined([item for piece in pieces for item in parser.push(piece)] + parser.flush())
    return [
        (item.name, json.loads(item.arguments)) if isinstance(item, ToolCall) else item
        for item in said
    ]


@pytest.mark.parametrize(("tool_format", "text", "expected"), CASES)
def test_calls_are_found_however_the_text_is_cut(
    tool_format: ToolFormat, text: str, expected: list[object]
) -> None:
    for size in (1, 2, 3, 7, 11, len(text) + 1):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert told(tool_format, pieces) == expected, size


@pytest.mark.parametrize("said", ODD_CALLS, ids=range(len(ODD_CALLS)))
def test_what_can_not_be_told_as_a_call_is_text(said: str) -> None:
    tagged = f"<tool_call>{said}</tool_call>"
    assert told(ToolFormat.HERMES, [tagged]) == [tagged]
    assert told(ToolFormat.LLAMA3, [said]) == [said]


def test_text_before_a_call_is_shown_as_soon_as_it_is_certain() -> None:
    parser = tool_parser(ToolFormat.HERMES, NAMES)
    assert parser.push("Look") == ["Look"]
    assert parser.push(" <tool") == []
    assert parser.push("box>") == [" <toolbox>"]


def test_calls_have_names_of_their_own() -> None:
    parser = tool_parser(ToolFormat.LIST, NAMES)
    calls = [item for item in parser.push(f"[{ADD},{ADD}]") if isinstance(item, ToolCall)]
    assert len({call.call_id for call in calls}) == 2
