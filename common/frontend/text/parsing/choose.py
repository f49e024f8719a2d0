"""The formats of a server's model: named by its flags, or found by what the checkpoint says.

Reads the checkpoint's config.json. Knows nothing of bodies.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TypeVar

import msgspec

from common import output_formats as names
from common.config import ServerConfig
from common.frontend.text.parsing.form import markers_in
from common.frontend.text.parsing.formats import CALL_FORMATS, REASONING_FORMATS, Signs
from common.frontend.text.parsing.parsing import GrammarTokens, Parsers
from common.frontend.text.tokenizer import Tokenizer
from common.grammar import is_token_of_grammars

logger = logging.getLogger(__name__)
F = TypeVar("F")


def open_parsers(config: ServerConfig, tokenizer: Tokenizer) -> Parsers:
    """What `--reasoning-parser` and `--tool-call-parser` say."""
    document = msgspec.json.decode((Path(config.model_path) / "config.json").read_bytes())
    template = tokenizer.chat_template
    return choose_parsers(
        config.reasoning_parser,
        config.tool_call_parser,
        templates=tuple(template.sources.values()) if template else (),
        architecture=(document.get("architectures") or [""])[0],
        added_tokens=tokenizer.added_tokens,
        special_ids=tokenizer.special_ids,
    )


def choose_parsers(
    reasoning: str,
    calls: str,
    *,
    templates: Sequence[str],
    architecture: str,
    added_tokens: Mapping[str, int],
    special_ids: Set[int],
) -> Parsers:
    """The formats that a server was told of by name: "" for none, `auto` for what the checkpoint
    says, which may be none."""
    signs = (" ".join(templates), architecture)
    reasoning_key = _choose(REASONING_FORMATS, names.REASONING_FORMATS, reasoning, *signs)
    call_key = _choose(CALL_FORMATS, names.TOOL_FORMATS, calls, *signs)
    if names.AUTO in (reasoning, calls):
        found = f"reasoning {reasoning_key or 'none'}, calls of tools {call_key or 'none'}"
        logger.info("formats of the model's output: %s", found)
    reasoning_form = REASONING_FORMATS[reasoning_key][0] if reasoning_key else None
    call_form = CALL_FORMATS[call_key][0] if call_key else None
    markers = markers_in(reasoning_form, call_form)
    own = {
        text: token_id
        for text, token_id in added_tokens.items()
        if any(text in marker for marker in markers)
    }
    named = {
        text: token_id
        for text, token_id in added_tokens.items()
        if is_token_of_grammars(text, is_special=token_id in special_ids)
    }
    return Parsers(
        reasoning=reasoning_form,
        calls=call_form,
        shown_ids=frozenset(special_ids) & frozenset(own.values()),
        tokens=GrammarTokens(
            markers={text: token_id for text, token_id in own.items() if text in named},
            texts={
                text: token_id for text, token_id in named.items() if token_id not in special_ids
            },
        ),
    )


def _choose(
    formats: Mapping[str, tuple[F, Signs]],
    named: dict[str, tuple[str, ...]],
    name: str,
    template: str,
    architecture: str,
) -> str:
    """The key of a format, "" for none."""
    if not name:
        return ""
    if name != names.AUTO:
        return names.format_of(name, named)
    for key, (_, signs) in formats.items():
        is_told = bool(signs.template) and all(part in template for part in signs.template)
        if is_told or (not template and architecture in signs.architectures):
            return key
    return ""
