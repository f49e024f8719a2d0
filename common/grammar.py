"""Grammars that bind an output: compiled, kept for others that ask for the same, followed by token;
and regular expressions that are looked for in it.

The one door to llguidance. What a grammar may cost is bounded by steps, not by seconds, so that it
is taken or refused alike wherever it is compiled. Knows nothing of tensors, slots or requests.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import assert_never

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from common.errors import GrammarError
from common.request import Grammar, GrammarKind
from common.request_bounds import GRAMMAR_LENGTH_MAX

CACHED_COUNT_MAX = 64
"""Compiled grammars that are kept; clients of one kind send the same few again and again."""

# A schema of a hundred nested objects takes a fifth of this and compiles in a tenth of a second.
COMPILE_FUEL_MAX = 500_000
GRAMMAR_SYMBOL_MAX = 50_000
# What one token may take: a few milliseconds, where ordinary grammars take 50 us.
STEP_FUEL_MAX = 50_000
STEP_ITEM_MAX = 5_000
ROW_ITEM_MAX = 500
# States of the lexer are kept, one to two kilobytes each.
LEXER_STATE_MAX = 20_000

WHITESPACE = r"(\x20|\x0A[\x20\x09]{0,40})"
"""Between the tokens of JSON, or nothing: as models write it, on one line or indented. Unbounded,
a model that has lost its way writes spaces until its last token."""

STYLE_KEY = "x-guidance"
"""Where a schema says itself how its JSON is to be written; then the bound above is not set."""

ERROR_LENGTH_MAX = 400
"""Characters of a reason; llguidance repeats the grammar in some of them."""

MASK_WORD_BITS = 32


class GrammarCompiler:
    """Grammars for one tokenizer. Safe to use from several threads at once.

    vocab_size: of the model, which may have more tokens than the tokenizer. Nothing is read before
    the first use.
    """

    def __init__(
        self, tokenizer_path: str, vocab_size: int, eos_token_ids: Sequence[int], thread_count: int
    ) -> None:
        self._tokenizer_path = tokenizer_path
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._executor = LLExecutor(thread_count)
        self._limits = _limits()

    def prepare(self) -> None:
        """Read the tokenizer, which takes half a second for a large one. Raises: GrammarError."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load()

    def start(self, grammar: Grammar, output_ids: Sequence[int] = ()) -> GrammarState:
        """Where `output_ids`, generated so far, lead in `grammar`.

        Raises: GrammarError if it can't be compiled or does not allow them.
        """
        self.prepare()
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
        if known is None:
            known = self._compile(grammar)
            with self._lock:
                self._compiled[grammar] = known
                if len(self._compiled) > CACHED_COUNT_MAX:
                    self._compiled.popitem(last=False)
        state = GrammarState(known.deep_copy())
        for token_id in output_ids:
            state.advance(token_id)
        return state

    def masks(self, states: Sequence[GrammarState]) -> NDArray[np.int32]:
        """int32[len(states), words]: whether token t may be next is bit t of a row, lowest first.

        A state that is broken then allows the end only.
        """
        word_count = -(-self._vocab_size // MASK_WORD_BITS)
        masks = np.zeros((len(states), word_count), dtype=np.int32)
        rows = [(state.matcher, row) for row, state in enumerate(states)]
        fill_next_token_bitmask_par(self._executor, rows, masks)
        return masks

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if len(grammar.text) > GRAMMAR_LENGTH_MAX:
            raise GrammarError(
                f"has {len(grammar.text)} characters; at most {GRAMMAR_LENGTH_MAX} are taken"
            )
        try:
            source = _source(grammar)
        except (ValueError, RecursionError) as exc:
            raise GrammarError(_shortened(str(exc))) from exc
        assert self._tokenizer is not None, "prepared"
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar may be too large for its first step, too
        if matcher.is_error():
            raise GrammarError(_shortened(matcher.get_error()))
        matcher.reset()
        return matcher

    def _load(self) -> LLTokenizer:
        path = Path(self._tokenizer_path) / "tokenizer.json"
        try:
            return LLTokenizer(
                path.read_text(encoding="utf-8"),
                n_vocab=self._vocab_size,
                eos_token=self._eos_token_ids,
            )
        except (OSError, ValueError) as exc:
            raise GrammarError(
                f"grammars can't be followed with this tokenizer: {_shortened(str(exc))}"
            ) from exc


class GrammarState:
    """A place in a grammar. One owner."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Nothing but the end may follow."""
        return self.matcher.is_stopped()

    @property
    def trouble(self) -> str:
        """Why nothing is known of what may follow, "" if nothing is wrong."""
        return _shortened(self.matcher.get_error()) if self.matcher.is_error() else ""

    def advance(self, token_id: int) -> None:
        """Take the next token. Raises: GrammarError if it is not allowed.

        A request that ignores ends goes on after them: the end may follow the end.
        """
        if not self.matcher.consume_token(token_id):
            raise GrammarError(self.trouble)


class RegexWatch:
    """Looks for a match of a regular expression in a text that comes in pieces. Each byte costs the
    same (2 us), whatever the expression and however long the text. One owner."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @staticmethod
    def of(pattern: str) -> RegexWatch:
        """Raises: GrammarError if it is none, or can't be looked for so: it looks around or back,
        is too large, or matches before the first character."""
        # By itself first: what is put around it could make an expression of one that is none.
        for text in (pattern, f"(?s:.*)(?:{pattern})"):
            source = LLMatcher.grammar_from_regex(text)
            matcher = LLMatcher(_byte_tokenizer(), source, log_level=0, limits=_limits())
            if matcher.is_error():
                raise GrammarError(_shortened(matcher.get_error()))
        if matcher.is_accepting():
            raise GrammarError("matches the empty text, so every output at its beginning")
        return RegexWatch(matcher)

    def copy(self) -> RegexWatch:
        """The same for another text, from where this one is."""
        return RegexWatch(self._matcher.deep_copy())

    def push(self, piece: str) -> bool:
        """Whether a match ends in this piece of the text. Raises: GrammarError if that can no more
        be told."""
        for byte in piece.encode():
            if not self._matcher.consume_token(byte):
                raise GrammarError(_shortened(self._matcher.get_error()))
            if self._matcher.is_accepting():
                return True
        return False


@cache
def _byte_tokenizer() -> LLTokenizer:
    """A token is a byte."""
    return LLTokenizer("byte")


def _limits() -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=COMPILE_FUEL_MAX,
        max_grammar_size=GRAMMAR_SYMBOL_MAX,
        step_lexer_fuel=STEP_FUEL_MAX,
        step_max_items=STEP_ITEM_MAX,
        max_items_in_row=ROW_ITEM_MAX,
        max_lexer_states=LEXER_STATE_MAX,
        verbose_errors=False,
    )


def _source(grammar: Grammar) -> str:
    """Raises: ValueError if a schema is not JSON."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)
        case GrammarKind.JSON_SCHEMA:
            schema = json.loads(grammar.text)
            if not isinstance(schema, dict):
                raise ValueError("a schema must be a JSON object")
            style = {} if STYLE_KEY in schema else {STYLE_KEY: {"whitespace_pattern": WHITESPACE}}
            return LLMatcher.grammar_from_json_schema({**schema, **style})
        case _:
            assert_never(grammar.kind)


def is_token_of_grammars(text: str, *, is_special: bool) -> bool:
    """Whether an added token is no text in a grammar, but itself: all that are special or look so.
    No text of a grammar holds it, and no token but this spells it."""
    return is_special or (text.startswith("<") and text.endswith(">"))


def lark_of(text: str) -> str:
    """A grammar in GBNF or Lark, as Lark. Raises: GrammarError if it is neither."""
    try:
        return str(any_to_lark(text))
    except Exception as exc:  # what the library raises for a bad grammar
        raise GrammarError(_shortened(str(exc))) from exc


def _shortened(reason: str) -> str:
    text = " ".join(reason.replace("<non-verbose/>", "").split())
    return text if len(text) <= ERROR_LENGTH_MAX else f"{text[:ERROR_LENGTH_MAX]}..."
