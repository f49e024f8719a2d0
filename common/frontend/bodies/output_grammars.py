"""Grammars of outputs that are more than one text: calls between markers, answers behind reasoning.

In Lark, as llguidance has it, where some tokens are no text and are named by their ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from common.frontend.bodies.constraints import Constraint, lark_grammar
from common.frontend.bodies.fields import JsonObject
from common.frontend.text.parsing.form import CallFormat, ReasoningFormat
from common.frontend.text.parsing.parsing import GrammarTokens
from common.grammar import STYLE_KEY, WHITESPACE
from common.request import Grammar, GrammarKind

ANY = r"ANY: /(.|\n)*/"
TEXT = r"TEXT: /(.|\n)+/"
INDEX = "INDEX: /[0-9]+/"
GAP = r"GAP: /[ \n]{0,2}/"


@dataclass(frozen=True, slots=True)
class Markup:
    """Text and markers as Lark. tokens: what is no text there, see `GrammarTokens`."""

    tokens: GrammarTokens

    def lark(self, text: str) -> str:
        """Text with markers and {index} in it, as a sequence."""
        return " ".join(self._part(part) for part in self._split(text) if part)

    def up_to(self, rule: str, marker: str, begin: str = "", passed: Sequence[str] = ()) -> str:
        """A rule for any text that ends with the first `marker`. begin: in Lark, what it begins
        with. passed: markers that may stand in the text."""
        if not any(token in marker for token in self.tokens.markers):
            return f"{rule}[lazy]: {begin} ANY {json.dumps(marker, ensure_ascii=False)}"
        return f"{rule}: {begin} {self.free(marker, passed)} {self.lark(marker)}"

    def free(self, marker: str, passed: Sequence[str] = ()) -> str:
        """Any text without `marker`."""
        known = self.tokens.markers
        ids = [known[one] for one in passed if one in known]
        ids += [token_id for token, token_id in self.tokens.texts.items() if token not in marker]
        return f"({' | '.join(['TEXT', *(f'<[{one}]>' for one in dict.fromkeys(ids))])})*"

    def _split(self, text: str) -> list[str]:
        tokens = sorted(self.tokens.markers, key=len, reverse=True)
        return re.split("(" + "|".join(map(re.escape, [*tokens, "{index}"])) + ")", text)

    def _part(self, text: str) -> str:
        if text == "{index}":
            return "INDEX"
        token_id = self.tokens.markers.get(text)
        return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"


def tagged_calls(
    tools: Sequence[tuple[str, JsonObject]], form: CallFormat, tokens: GrammarTokens
) -> str:
    """Text with calls of `tools`, (name, schema of the parameters), in it, or text alone."""
    assert form.written is not None, "only such a format can be held"
    markup = Markup(tokens)
    opening = form.openings[0]
    calls = [f"call_{index}" for index in range(len(tools))]
    rules = [
        f"start: ({' | '.join(calls)})* {markup.free(opening, form.passed)}",
        *(ANY, TEXT, INDEX),
        markup.up_to("opened", opening, passed=form.passed),
    ]
    for call, (name, schema) in zip(calls, tools, strict=True):
        begin = markup.lark(form.written.begin.replace("{name}", name))
        end = markup.lark(form.written.end)
        rules.append(f"{call}: opened {begin} %json {_styled(schema)} {end}")
    return "\n".join(rules)


def behind_reasoning(
    constraint: Constraint,
    form: ReasoningFormat,
    tokens: GrammarTokens,
    *,
    is_inside: bool,
) -> Constraint:
    """The same for an answer that reasoning may stand before. is_inside: it does, and has begun.

    Raises: RequestError if it becomes too long.
    """
    markup = Markup(tokens)
    introduced = markup.lark(form.introduction)
    rules = [ANY, TEXT, GAP, f"answer: {introduced} {_inner(constraint.grammar)}"]
    following = f"thought {markup.lark(form.next_message)} GAP answer"
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
