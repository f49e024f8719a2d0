"""A checkpoint's tokenizer gives what transformers gives, without importing it."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from common.errors import ConfigError, RequestError
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.text.tokenizer import BYTE_ALPHABET, Tokenizer, load_tokenizer
from tests.frontend.tiny_tokenizers import BACKENDS, CHATML, byte_level_backend, write_tokenizer

WALL = datetime(2026, 7, 26, 12, 0).timestamp()
PROMPTS = [
    "The quick brown fox",
    "  two  spaces and\nlines\n\n",
    "naïve 你好 🚀 <|im_start|>user<think> x",
    "é",
]
CHATS: list[list[JsonObject]] = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a <b> & 'c'"}],
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "he", "name": None}],
]
TOOL: JsonValue = {"type": "function", "function": {"name": "f", "parameters": {"q": "<é>"}}}


def wall() -> float:
    return WALL


@pytest.fixture
def chat_dir(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path, eos_token="<|im_end|>", chat_template=CHATML)


@pytest.fixture
def chat_tokenizer(chat_dir: Path) -> Tokenizer:
    return load_tokenizer(str(chat_dir), wall)


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_encoding_and_decoding_equal_transformers(name: str, tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path, BACKENDS[name]())
    ours = load_tokenizer(str(directory), wall)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
    for text in PROMPTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == ids
        for skips in (True, False):
            expected = theirs.decode(
                ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False
            )
            assert ours.decode(ids, skip_special_tokens=skips) == expected


def test_a_tokenizer_that_cuts_or_pads_is_told_not_to(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path, backend)), wall)
    text = "The quick brown fox jumps"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokens_that_only_the_config_knows_are_added(tmp_path: Path) -> None:
    size = byte_level_backend().get_vocab_size()
    added = {str(size): {"content": "<tool>", "special": True}}
    directory = write_tokenizer(tmp_path, added_tokens_decoder=added)
    tokenizer = load_tokenizer(str(directory), wall)
    assert tokenizer.encode("<tool>") == [size]
    assert tokenizer.decode([size]) == ""
    assert tokenizer.vocab_size == size + 1


def test_named_tokens_are_special(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path, eos_token={"content": "</think>"})
    tokenizer = load_tokenizer(str(directory), wall)
    end = tokenizer.encode("</think>")
    assert len(end) == 1
    assert tokenizer.decode(end) == ""
    assert tokenizer.is_special(end[0])


def test_token_texts_and_bytes_are_those_inside_a_sequence() -> None:
    byte_level = Tokenizer(byte_level_backend(), None)
    half = byte_level.encode("🚀")[0]
    assert byte_level.token_text(half) == "\ufffd"
    assert byte_level.token_bytes(half) == "🚀".encode()[: len(byte_level.token_bytes(half))]
    assert b"".join(map(byte_level.token_bytes, byte_level.encode("a🚀 é"))) == "a🚀 é".encode()
    assert byte_level.token_text(10**6) == ""
    fallback = Tokenizer(BACKENDS["byte fallback"](), None)
    the = fallback.encode("the", add_special_tokens=False)
    assert "".join(map(fallback.token_text, the)) == " the"
    rocket = fallback.encode("🚀", add_special_tokens=False)[1:]
    assert b"".join(map(fallback.token_bytes, rocket)) == "🚀".encode()


def test_the_byte_alphabet_is_the_library_s() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(BYTE_ALPHABET) == set(ByteLevel.alphabet())
    assert sorted(BYTE_ALPHABET.values()) == list(range(256))


def test_a_lone_surrogate_is_refused(chat_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        chat_tokenizer.encode("a\ud800")


# ---- files that can't be used --------------------------------------------------------------------


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path), wall)


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": {"type": "Nope"}}'])
def test_a_broken_tokenizer_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json.* can't be read"):
        load_tokenizer(str(tmp_path), wall)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "can't be read"),
        ("[]", "must hold a JSON object"),
        ('{"added_tokens_decoder": {"x": {"content": "<a>"}}}', "'x'; keys must be token ids"),
        ('{"chat_template": "{% for %}"}', "'default' is not valid Jinja"),
    ],
)
def test_a_broken_tokenizer_config_is_named(content: str, message: str, tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path)
    (directory / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(str(directory), wall)


def test_loading_imports_neither_torch_nor_transformers(chat_dir: Path) -> None:
    code = (
        "import sys; from common.frontend.text.tokenizer import load_tokenizer; "
        f"load_tokenizer({str(chat_dir)!r}, lambda: 0.0); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# ---- chat templates ------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_chats_render_as_in_transformers(
    messages: list[JsonObject], tools: list[JsonValue] | None, chat_dir: Path
) -> None:
    ours = load_tokenizer(str(chat_dir), wall)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(chat_dir), local_files_only=True)
    for kwargs in ({}, {"enable_thinking": False}):
        expected = theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False, **kwargs
        )
        got = ours.render_chat(messages, tools=tools, template_kwargs=kwargs)
        assert got == expected
    ending = theirs.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert ending == ours.render_chat(
        messages, add_generation_prompt=False, continue_final_message=True
    )


def test_a_continued_message_is_left_open(chat_tokenizer: Tokenizer) -> None:
    messages: list[JsonObject] = [{"role": "assistant", "content": [{"text": "once upon "}]}]
    got = chat_tokenizer.render_chat(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert got == "<|im_start|>assistant\nonce upon "


def test_parts_are_joined_for_a_template_that_knows_none(chat_tokenizer: Tokenizer) -> None:
    parts: JsonValue = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    got = chat_tokenizer.render_chat([{"role": "user", "content": parts}])
    assert got.startswith("<|im_start|>user\na b<|im_end|>")


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}",
        "{% for m in messages %}{% set c = m['content'] %}"
        "{% for p in c %}[{{ p['text'] }}]{% endfor %}{% endfor %}",
    ],
)
def test_parts_are_handed_to_a_template_that_walks_them(source: str, tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path, chat_template=source)
    tokenizer = load_tokenizer(str(directory), wall)
    parts: JsonValue = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert tokenizer.render_chat([{"role": "user", "content": parts}]) == "[a][b]"


def test_templates_see_special_tokens_the_date_and_published_tags(tmp_path: Path) -> None:
    source = (
        "{{ bos_token }}{{ strftime_now('%Y-%m-%d') }}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    directory = write_tokenizer(tmp_path, bos_token="<|endoftext|>")
    (directory / "chat_template.jinja").write_text(source)
    tokenizer = load_tokenizer(str(directory), wall)
    messages: list[JsonObject] = [{"content": "one"}, {"content": "two"}]
    assert tokenizer.render_chat(messages) == "<|endoftext|>2026-07-26one"


def test_the_template_for_tools_is_taken_when_there_are_tools(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path, chat_template=templates)), wall)
    assert tokenizer.render_chat([{"content": "x"}]) == "plain"
    assert tokenizer.render_chat([{"content": "x"}], tools=[TOOL]) == "tools"


def test_a_template_that_is_named_is_used_instead_of_the_checkpoint_s(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    directory = write_tokenizer(tmp_path, bos_token="<|endoftext|>", chat_template=templates)
    (directory / "chat_template.jinja").write_text("the checkpoint's file")
    named = tmp_path / "mine.jinja"
    named.write_text("{{ bos_token }}{% if tools %}mine with tools{% else %}mine{% endif %}")
    tokenizer = load_tokenizer(str(directory), wall, str(named))
    assert tokenizer.render_chat([{"content": "x"}]) == "<|endoftext|>mine"
    assert tokenizer.render_chat([{"content": "x"}], tools=[TOOL]) == "<|endoftext|>mine with tools"
    named.write_text("{% if %}")
    with pytest.raises(ConfigError, match="is not valid Jinja"):
        load_tokenizer(str(directory), wall, str(named))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses the messages"),
        ("{{ 1 / 0 }}", "refuses the messages"),
        ("{{ messages.append(1) }}", "refuses the messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages"),
        ("{{ messages[7].content.x }}", "refuses the messages"),
    ],
)
def test_what_a_template_refuses_is_the_client_s_400(
    source: str, message: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path, chat_template=source)), wall)
    with pytest.raises(RequestError, match=message) as caught:
        tokenizer.render_chat([{"role": "user", "content": "x"}])
    assert caught.value.status == 400
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("source", "content"), [("{{ messages[0].content }}", None), ("nothing", "text")]
)
def test_a_message_that_can_not_be_continued_is_refused(
    source: str, content: JsonValue, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path, chat_template=source)), wall)
    with pytest.raises(RequestError, match="continue_final_message"):
        tokenizer.render_chat(
            [{"role": "assistant", "content": content}],
            add_generation_prompt=False,
            continue_final_message=True,
        )


def test_a_checkpoint_without_a_template_says_so(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path)), wall)
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_a_checkpoint_with_only_a_tool_template_says_so(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}]
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path, chat_template=templates)), wall)
    with pytest.raises(RequestError, match="no default chat template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_special_tokens_map_fills_what_the_config_lacks(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path, chat_template="{{ eos_token }}")
    (directory / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}})
    )
    assert load_tokenizer(str(directory), wall).render_chat([{}]) == "<|im_end|>"
