"""A checkpoint's tokenizer: text to token ids and back, and its chat template.

Reads `tokenizer.json` as it is, through the tokenizers library alone: the frontend must stay free
of torch, which transformers' AutoTokenizer imports. Never asks a network and never runs a
checkpoint's code. Knows nothing of requests or HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from common.errors import ConfigError, RequestError
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.text.chat_template import ChatTemplate
from common.frontend.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from common.frontend.text.token_bound import token_nbytes_max

# The names under which a checkpoint lists the special tokens that templates may refer to.
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """Encodes, decodes and renders chats. Safe to use from several threads at once.

    chat_template: None if the checkpoint has none. added_tokens: ids by their text; special_ids:
    of those that are no text.
    """

    def __init__(self, backend: Backend, chat_template: ChatTemplate | None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.chat_template = chat_template
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = decoder_types(backend)
        self._is_byte_level = decoder == ["ByteLevel"]
        self._has_byte_level = "ByteLevel" in decoder
        self._has_byte_fallback = "ByteFallback" in decoder
        self._bytes_of: dict[int, bytes] = {}  # bounded by the vocabulary
        self._token_nbytes_max = token_nbytes_max(backend)

    @property
    def vocab_size(self) -> int:
        """Token ids that have a text; a model may have more rows than that."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises: RequestError if it is not valid Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise RequestError("the text has a lone surrogate, which is no character") from exc
        # Unlike `encode`, this lets other threads run.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def token_count_min(self, text: str) -> int:
        """So many tokens `text` has at least, found without encoding it."""
        if self._token_nbytes_max is None:
            return 0
        return -(-len(text) // self._token_nbytes_max)  # a character is a byte or more

    def text_length_max(self, token_count: int) -> int | None:
        """Characters that so many tokens can stand for; None if that has no bound."""
        if self._token_nbytes_max is None:
            return None
        return token_count * self._token_nbytes_max

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids` on their own; ids that the tokenizer does not know have none."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text that the token adds inside a sequence; a part of a character shows as U+FFFD."""
        if self._is_byte_level:
            return self.token_bytes(token_id).decode("utf-8", errors="replace")
        # A decoder may treat the first token of a sequence in its own way: look at the second.
        once = self.decode([token_id], skip_special_tokens=False)
        twice = self.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(once) :]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds; exact also where they are a part of a character."""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._find_token_bytes(token_id)
            self._bytes_of[token_id] = known
        return known

    def _find_token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return spelled_bytes(token)
        if self._is_byte_token(token_id):
            return bytes([int(token[3:5], 16)])
        return self.token_text(token_id).encode()

    def _is_byte_token(self, token_id: int) -> bool:
        """Whether it stands for one byte, as "<0x0A>" does where a decoder falls back to bytes."""
        if not self._has_byte_fallback:
            return False
        token = self._backend.id_to_token(token_id)
        if token is None or len(token) != 6 or not token.startswith("<0x") or token[5] != ">":
            return False
        return all(digit in "0123456789ABCDEFabcdef" for digit in token[3:5])

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """Turns the tokens that follow `prompt_ids` into text, one by one.

        shown_ids: special tokens that are not skipped after all.
        """
        skipped = self.special_ids - shown_ids if skip_special_tokens else frozenset[int]()
        if self._is_byte_level:
            return ByteDetokenizer(self.token_bytes, skipped)
        return WindowDetokenizer(
            lambda ids: self.decode(ids, skip_special_tokens=False),
            prompt_ids,
            is_skipped=lambda i: i in skipped or self._backend.id_to_token(i) is None,
            is_byte_token=self._is_byte_token,
            may_split_characters=self._has_byte_level,
        )

    def render_chat(
        self,
        messages: list[JsonObject],
        *,
        tools: list[JsonValue] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, JsonValue] | None = None,
    ) -> str:
        """The prompt that the checkpoint's chat template makes of `messages`.

        Raises: RequestError if there is no template or it refuses the messages.
        """
        if self.chat_template is None:
            raise RequestError(
                "this checkpoint has no chat template; use /v1/completions or /generate"
            )
        return self.chat_template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs or {},
        )


def load_tokenizer(path: str, wall: Callable[[], float]) -> Tokenizer:
    """The tokenizer of the checkpoint directory `path`. wall: the clock that templates may ask.

    Raises: ConfigError if a file is missing or can't be used.
    """
    directory = Path(path)
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"tokenizer {path!r}: there is no tokenizer.json in it (other formats are not read)"
        )
    try:
        backend = Backend.from_file(str(file))
    except Exception as exc:  # what the library raises for a bad file
        raise ConfigError(f"tokenizer {str(file)!r} can't be read: {exc}") from exc
    config = _read_object(directory / "tokenizer_config.json")
    named = _named_tokens({**_read_object(directory / "special_tokens_map.json"), **config})
    _add_tokens(backend, config, named)
    source = _template_sources(directory, config)
    template = ChatTemplate(source, named, wall) if source else None
    return Tokenizer(backend, template)


def decoder_types(backend: Backend) -> list[str]:
    """The decoder's steps by name; a tokenizer without a decoder joins tokens by spaces."""
    decoder: JsonValue = json.loads(backend.to_str()).get("decoder")
    if not isinstance(decoder, dict):
        return []
    steps = decoder.get("decoders")
    parts = steps if decoder.get("type") == "Sequence" and isinstance(steps, list) else [decoder]
    return [str(part.get("type")) for part in parts if isinstance(part, dict)]


def _byte_alphabet() -> dict[str, int]:
    """How byte-level BPE spells a byte as one character: printable ones as themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    spelled.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return spelled


BYTE_ALPHABET = _byte_alphabet()


def spelled_bytes(token: str) -> bytes:
    """The bytes a byte-level token spells; a token outside the alphabet is its own text."""
    try:
        return bytes(BYTE_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode()


def _read_object(file: Path) -> JsonObject:
    """A JSON object, empty if the file is missing."""
    if not file.is_file():
        return {}
    try:
        content: JsonValue = json.loads(file.read_bytes())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"tokenizer file {str(file)!r} can't be read: {exc}") from exc
    if not isinstance(content, dict):
        raise ConfigError(f"tokenizer file {str(file)!r} must hold a JSON object")
    return content


def _token_text(value: JsonValue) -> str | None:
    """A token as config files spell it: a string, or an object with its content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _named_tokens(config: JsonObject) -> dict[str, str]:
    texts = {name: _token_text(config.get(name)) for name in NAMED_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def _add_tokens(backend: Backend, config: JsonObject, named: Mapping[str, str]) -> None:
    """Add what only tokenizer_config.json knows, so that it is never split or shown as text."""
    listed = config.get("added_tokens_decoder")
    known = backend.get_vocab(with_added_tokens=True)
    for _, entry in sorted((listed if isinstance(listed, dict) else {}).items(), key=_id_of):
        text = _token_text(entry)
        if text is None or not isinstance(entry, dict) or text in known:
            continue
        token = AddedToken(
            text,
            lstrip=entry.get("lstrip") is True,
            rstrip=entry.get("rstrip") is True,
            single_word=entry.get("single_word") is True,
            normalized=entry.get("normalized") is True,
            special=entry.get("special") is True,
        )
        backend.add_tokens([token])
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in named.values():
        is_special = text in added and added[text].special
        if not is_special and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _id_of(entry: tuple[str, JsonValue]) -> int:
    try:
        return int(entry[0])
    except ValueError as exc:
        raise ConfigError(
            f"tokenizer_config.json: added_tokens_decoder has the key {entry[0]!r}; "
            "keys must be token ids"
        ) from exc


def _template_sources(directory: Path, config: JsonObject) -> dict[str, str]:
    """Template name -> source; a file of its own wins over tokenizer_config.json."""
    sources: dict[str, str] = {}
    listed = config.get("chat_template")
    if isinstance(listed, str):
        sources["default"] = listed
    elif isinstance(listed, list):
        for entry in listed:
            name = entry.get("name") if isinstance(entry, dict) else None
            text = entry.get("template") if isinstance(entry, dict) else None
            if isinstance(name, str) and isinstance(text, str):
                sources[name] = text
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            sources = {"default": file.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"chat template {str(file)!r} can't be read: {exc}") from exc
    return sources
