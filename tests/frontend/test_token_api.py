"""/tokenize and /detokenize are each other's inverse, in vLLM's shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.frontend.bodies.fields import JsonObject
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import TOKENIZER, VOCAB_SIZE, post_object, run_generate

TEXT = "hello, hello Ångström 🙂"
IDS = TOKENIZER.encode(TEXT)
CHAT = "<|im_start|>user\nhello<|im_end|>\n"
BAD: list[tuple[str, JsonObject, str]] = [
    ("tokenize", {}, "prompt"),
    ("tokenize", {"prompt": "a", "messages": []}, "prompt"),
    ("tokenize", {"prompt": 5}, "prompt"),
    ("tokenize", {"prompt": ["a", 5]}, "prompt"),
    ("tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ("tokenize", {"messages": [5]}, "messages"),
    ("tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": 5}, "tools"),
    ("tokenize", {"prompt": "a", "tools": {"not": "a list"}}, "tools"),
    ("detokenize", {}, "tokens"),
    ("detokenize", {"tokens": "a"}, "tokens"),
    ("detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
    ("detokenize", {"tokens": [-1]}, "tokens"),
    ("detokenize", {"tokens": [[1], [-1]]}, "tokens[1]"),
    ("detokenize", {"tokens": [[1], 5]}, "tokens"),
]


@pytest.mark.parametrize("root", ["", "/v1"])
def test_what_was_tokenized_is_detokenized(tmp_path: Path, root: str) -> None:
    async def story(rig: Rig) -> None:
        told = await post_object(rig, f"{root}/tokenize", {"prompt": TEXT, "model": "tiny"})
        assert told == {"count": len(IDS), "max_model_len": 512, "tokens": IDS, "token_strs": None}
        text = await post_object(rig, f"{root}/detokenize", {"tokens": IDS})
        assert text == {"prompt": TEXT, "text": TEXT}

        many = await post_object(rig, f"{root}/tokenize", {"prompt": [TEXT, "a"]})
        assert many["tokens"] == [IDS, TOKENIZER.encode("a")]
        assert many["count"] == [len(IDS), 1]
        texts = await post_object(rig, f"{root}/detokenize", {"tokens": many["tokens"]})
        assert texts["text"] == [TEXT, "a"]
        assert rig.scheduler.submits == []

    run_generate(tmp_path, story)


def test_chats_are_rendered_first(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {"messages": [{"role": "user", "content": "hello"}]}
        told = await post_object(
            rig,
            "/tokenize",
            {**body, "add_generation_prompt": False, "return_token_strs": True},
        )
        assert told["tokens"] == TOKENIZER.encode(CHAT, add_special_tokens=False)
        assert "".join(map(str, told["token_strs"])) == CHAT  # type: ignore[arg-type]
        asked = await post_object(rig, "/tokenize", body)
        shown = await post_object(rig, "/detokenize", {"tokens": asked["tokens"]})
        assert shown["prompt"] == f"{CHAT}<|im_start|>assistant\n"

    run_generate(tmp_path, story)


def test_bad_input_is_a_400_that_names_its_field(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for path, body, field in BAD:
            reply = await rig.http.post(f"/v1/{path}", json=body)
            assert reply.status_code == 400, (body, reply.text)
            assert reply.json()["error"]["param"] == field, body

    run_generate(tmp_path, story)
