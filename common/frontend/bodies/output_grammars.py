"""Grammars of outputs that are more than one text: calls between markers, answers behind reasoning.

In Lark, as llguidance has it: a special token is no text there, and is named by its id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from common.frontend.bodies.constraints import Constraint, lark_grammar
from common.frontend.bodies.fields import JsonObject
from common.frontend.text.parsing.form import CallFormat, ReasoningFormat
from common.grammar import STYLE_KEY, WHITESPACE
from common.request import Grammar, GrammarKind

TEXT = r"TEXT: /(.|\n)+/"
INDEX = "INDEX: /[0-9]+/"
GAP = r"GAP: /[ \t\r\n]{0,8}/"


@dataclass(frozen=True, slots=True)
class Markup:
    """Markers as Lark. special: ids of the special tokens among them, by their text."""

    special: Mapping[str, int]

    def lark(self, text: str) -> str:
        """Text with special tokens and {index} in it, as a sequence."""
        return " ".join(self._part(part) for part in self._split(text) if part)

    def is_plain(self, text: str) -> bool:
        """Whether no special token stands in it."""
        return not any(token in text for token in self.special)

    def up_to(self, rule: str, marker: str, begin: str = "", others: Sequence[str] = ()) -> str:
        """A rule for any text that ends with the first `marker`. begin: in Lark, what it begins
        with. others: special tokens that may stand in the text."""
        if self.is_plain(marker):
            return f"{rule}[lazy]: {begin} ANY {json.dumps(marker)}"
        free = " | ".join(["TEXT", *(f"<[{self.special[one]}]>" for one in others)])
        return f"{rule}: {begin} ({free})* {self.lark(marker)}"

    def _split(self, text: str) -> list[str]:
        tokens = sorted(self.special, key=len, reverse=True)
        return re.split("(" + "|".join(map(re.escape, [*tokens, "{index}"])) + ")", text)

    def _part(self, text: str) -> str:
        if text == "{index}":
            return "INDEX"
        return f"<[{self.special[text]}]>" if text in self.special else json.dumps(text)


def tagged_calls(
    tools: Sequence[tuple[str, JsonObject]], form: CallFormat, special: Mapping[str, int]
) -> str:
    """Text with calls of `tools`, (name, schema of the parameters), in it, or text alone."""
    assert form.written is not None, "only such a format can be held"
    markup = Markup(special)
    trigger = form.openings[0]
    passed = [marker for marker in form.passed if marker in special]
    free = " | ".join(["TEXT", *(f"<[{special[one]}]>" for one in passed)])
    calls = [f"call_{index}" for index in range(len(tools))]
    rules = [
        f"start: ({' | '.join(calls)})* ({free})*",
        r"ANY: /(.|\n)*/",
        TEXT,
        INDEX,
        markup.up_to("opened", trigger, others=passed),
    ]
    for call, (name, schema) in zip(calls, tools, strict=True):
        begin = markup.lark(form.written.begin.replace("{name}", name))
        end = markup.lark(form.written.end)
        rules.append(f"{call}: opened {begin} %json {_styled(schema)} {end}")
    return "\n".join(rules)


def behind_reasoning(
    constraint: Constraint,
    form: ReasoningFormat,
    special: Mapping[str, int],
    *,
    is_inside: bool,
) -> Constraint:
    """The same for an answer that reasoning may stand before. is_inside: it does, and has begun.

    Raises: RequestError if it becomes too long.
    """
    markup = Markup(special)
    introduced = markup.lark(form.introduction)
    rules = [r"ANY: /(.|\n)*/", TEXT, GAP, f"answer: GAP {introduced} {_inner(constraint.grammar)}"]
    following = f"thought {markup.lark(form.next_message)} answer"
    if is_inside:
        rules += [f"start: {following}", markup.up_to("thought", form.closing)]
    else:
        opening = f"GAP {markup.lark(form.opening)}"
        rules += [f"start: answer | {following}", markup.up_to("thought", form.closing, opening)]
    text = "\n".join(rules)
    return Constraint(constraint.field, lark_grammar(text, constraint.field))


def _inner(grammar: Grammar) -> str:
    """A grammar as a part of another one."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema: JsonObject = msgspec.json.decode(grammar.text)
            return f"%json {_styled(schema)}"
        case GrammarKind.REGEX:
            slashed = re.sub(
                r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], grammar.text,
                flags=re.DOTALL,
            )  # fmt: skip
            return f"/{slashed}/"
        case GrammarKind.LARK:
            return f"%lark {{\n{grammar.text}\n}}"


def _styled(schema: JsonObject) -> str:
    return json.dumps({STYLE_KEY: {"whitespace_pattern": WHITESPACE}, **schema})
