"""How few tokens a text can have, known without encoding it, to refuse at once what is too long.

Knows nothing of requests. Source: the steps of a `tokenizer.json` (Hugging Face tokenizers).
"""

from __future__ import annotations

import json

from tokenizers import Tokenizer as Backend

from common.frontend.bodies.fields import JsonObject, JsonValue

# NFC and NFKC put up to four characters together, of three bytes each, into one of three.
COMPOSED_FACTOR = 4
# Steps that keep every byte of a text, or write more. All others may drop or merge some.
NORMALIZERS = {"NFC": COMPOSED_FACTOR, "NFKC": COMPOSED_FACTOR, "Prepend": 1}
PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split"})


def token_nbytes_max(backend: Backend) -> int | None:
    """The most bytes of UTF-8 text that one token can stand for; None if there is no such bound.

    There is one where every byte of a text ends up in a token: byte-level BPE, and BPE that falls
    back to bytes. Elsewhere unknown text may be dropped or become one token, whatever its length.
    """
    steps: JsonObject = json.loads(backend.to_str())
    model = _object(steps.get("model"))
    pre_tokenizers = _parts(steps.get("pre_tokenizer"), "pretokenizers")
    kinds = {str(step.get("type")) for step in pre_tokenizers}
    keeps_bytes = "ByteLevel" in kinds or model.get("byte_fallback") is True
    if model.get("type") != "BPE" or not keeps_bytes or not kinds <= PRE_TOKENIZERS:
        return None
    if any(step.get("behavior") == "Removed" for step in pre_tokenizers):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # they take any number of spaces along
    factor = 1
    for step in _parts(steps.get("normalizer"), "normalizers"):
        kind = str(step.get("type"))
        if kind not in NORMALIZERS and not _is_longer_replacement(step):
            return None
        factor *= NORMALIZERS.get(kind, 1)
    texts = [*backend.get_vocab(with_added_tokens=True)]
    return factor * max(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def _is_longer_replacement(step: JsonObject) -> bool:
    """Whether a Replace step writes at least as many bytes as it takes."""
    pattern, content = _object(step.get("pattern")).get("String"), step.get("content")
    if step.get("type") != "Replace" or not isinstance(pattern, str):
        return False
    return isinstance(content, str) and len(content.encode()) >= len(pattern.encode())


def _parts(step: JsonValue, name: str) -> list[JsonObject]:
    """The steps of a normalizer or pre-tokenizer, which may be a sequence or absent."""
    one = _object(step)
    if one.get("type") == "Sequence":
        parts = one.get(name)
        found = [part for part in map(_object, parts if isinstance(parts, list) else []) if part]
        return [inner for part in found for inner in _parts(part, name)]
    return [one] if one else []


def _object(value: JsonValue) -> JsonObject:
    return value if isinstance(value, dict) else {}
