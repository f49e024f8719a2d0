"""Bodies of many megabytes: refused early, held in bounds, and never in the way of the others."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers

from common.errors import RequestError
from common.frontend.apis import openai_api, sglang_api, token_api
from common.frontend.bodies import reader as bodies
from common.frontend.bodies.fields import JsonObject
from common.frontend.bodies.reader import HELD_BODY_COUNT, LARGE_BODY_NBYTES, BodyReader
from common.frontend.text.token_bound import token_nbytes_max
from common.frontend.text.tokenizer import Tokenizer
from tests.frontend.frontend_rig import Rig, run_with_rig
from tests.frontend.tiny_tokenizers import (
    byte_fallback_backend,
    byte_level_backend,
    metaspace_backend,
    word_piece_backend,
)

BACKENDS = {
    "byte level": byte_level_backend,
    "byte fallback": byte_fallback_backend,
    "metaspace": metaspace_backend,
    "word piece": word_piece_backend,
}
LIMIT = 2 * LARGE_BODY_NBYTES


def composing_backend() -> Backend:
    backend = byte_level_backend()
    backend.normalizer = normalizers.NFC()
    return backend


TOKENIZERS = {name: Tokenizer(make(), None) for name, make in BACKENDS.items()}
TOKENIZERS["composing"] = Tokenizer(composing_backend(), None)
# Among them what composes: a Greek letter with three accents is one character in NFC.
TEXTS = st.text(
    st.sampled_from("ab \n\tz0é漢🙂\u0301ᾳ") | st.characters(codec="utf-8"), max_size=60
)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(text=TEXTS | TEXTS.map(lambda text: text * 9) | st.just("α\u0313\u0301\u0345" * 20))
def test_no_text_has_fewer_tokens_than_are_foretold(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.token_count_min(text) <= len(token_ids)


def test_a_bound_is_found_where_every_byte_ends_up_in_a_token() -> None:
    found = {name: token_nbytes_max(make()) is not None for name, make in BACKENDS.items()}
    assert found == {
        "byte level": True, "byte fallback": True, "metaspace": False, "word piece": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "@"}),
        ("/generate", {"text": ["hello", "@"]}),
        ("/v1/completions", {"prompt": "@"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "@"}]}),
    ],
)
def test_a_prompt_that_is_far_too_long_is_refused_without_encoding_it(
    tmp_path: Path, path: str, body: JsonObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Tokenizer.encode

    def encode_short(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert len(text) < LARGE_BODY_NBYTES, "must be refused by its length"
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", encode_short)
    text = "word " * (LARGE_BODY_NBYTES // 4)

    def filled(value: object) -> object:
        match value:
            case "@":
                return text
            case dict():
                return {key: filled(one) for key, one in value.items()}
            case list():
                return [filled(one) for one in value]
            case _:
                return value

    async def story(rig: Rig) -> None:
        reply = await rig.http.post(path, json=filled(body))
        assert reply.status_code == 400, reply.text[:200]
        assert "the prompt has at least " in reply.json()["error"]["message"]

    parts = (sglang_api.build_router, openai_api.build_router, token_api.build_router)
    (tmp_path / "tiny").mkdir()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "tiny" / "chat_template.jinja").write_text(template)
    run_with_rig(tmp_path, story, parts=parts, max_body_nbytes=LIMIT)


def test_other_threads_run_while_a_text_is_encoded() -> None:
    tokenizer, text = TOKENIZERS["byte level"], "some words, 漢字 " * 100_000
    has_begun, has_ended = threading.Event(), threading.Event()

    def encode() -> None:
        has_begun.set()
        tokenizer.encode(text)
        has_ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    has_begun.wait()
    turn_count = 0
    while not has_ended.is_set():
        turn_count += 1
    thread.join()
    # The interpreter changes threads a few times around the call; within it, it goes on.
    assert turn_count > 10_000


# ---- room ----------------------------------------------------------------------------------------


class Upload:
    """One request whose body arrives when the test says so."""

    def __init__(self, nbytes: int, *, says_length: bool = True) -> None:
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue()
        headers = [(b"content-length", b"%d" % nbytes)] if says_length else []
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
        self.request = Request(scope, self._receive)
        self._nbytes = nbytes

    async def _receive(self) -> dict[str, object]:
        chunk = await self._chunks.get()
        return {"type": "http.request", "body": chunk, "more_body": bool(chunk)}

    def arrive(self) -> None:
        filling = b" " * (self._nbytes - 2)
        self._chunks.put_nowait(b"{" + filling + b"}")
        self._chunks.put_nowait(b"")


def upload_of(body: bytes) -> Request:
    """A request whose body is there."""
    upload = Upload(len(body))
    upload._chunks.put_nowait(body)
    upload._chunks.put_nowait(b"")
    return upload.request


def run(story: Callable[[BodyReader], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(BodyReader(LIMIT)), 60))


async def settle() -> None:
    """Let every task go on as far as it can without anything from outside."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_large_bodies_wait_for_room_in_order_and_small_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(reader: BodyReader) -> None:
        uploads = [Upload(LIMIT) for _ in range(HELD_BODY_COUNT + 2)]
        tasks = [
            asyncio.create_task(reader.read(upload.request, lambda body: body))
            for upload in uploads
        ]
        await settle()
        assert reader.held_nbytes == HELD_BODY_COUNT * LIMIT
        small = Upload(100)
        small.arrive()
        assert await reader.read(small.request, lambda body: body) == {}
        # One that does not say its length is small until it is not.
        silent = Upload(100, says_length=False)
        silent.arrive()
        assert await reader.read(silent.request, lambda body: body) == {}
        for upload in uploads:
            upload.arrive()
        assert await asyncio.gather(*tasks) == [{}] * len(uploads)
        assert reader.held_nbytes == 0

    run(story)


def test_a_large_body_without_its_length_takes_the_room_of_the_largest() -> None:
    async def story(reader: BodyReader) -> None:
        held: list[int] = []

        def check(body: JsonObject) -> JsonObject:
            held.append(reader.held_nbytes)
            return body

        upload = Upload(LARGE_BODY_NBYTES, says_length=False)
        upload.arrive()
        assert await reader.read(upload.request, check) == {}
        assert (held, reader.held_nbytes) == ([LIMIT], 0)

    run(story)


def test_a_body_without_room_is_a_503_and_one_that_does_not_arrive_a_408(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "ROOM_TIMEOUT_S", 0.01)

    async def story(reader: BodyReader) -> None:
        uploads = [Upload(LIMIT) for _ in range(HELD_BODY_COUNT)]
        tasks = [
            asyncio.create_task(reader.read(upload.request, lambda body: body))
            for upload in uploads
        ]
        await settle()
        with pytest.raises(RequestError, match="no room for a body") as refused:
            await reader.read(Upload(LIMIT).request, lambda body: body)
        assert refused.value.status == 503
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert reader.held_nbytes == 0
        monkeypatch.setattr(bodies, "ARRIVAL_TIMEOUT_S", 0.01)
        with pytest.raises(RequestError, match="did not arrive") as late:
            await reader.read(Upload(LIMIT).request, lambda body: body)
        assert (late.value.status, reader.held_nbytes) == (408, 0)

    run(story)


def test_who_gives_up_waiting_lets_the_next_one_in() -> None:
    async def story(reader: BodyReader) -> None:
        first = Upload(3 * LIMIT)  # more than is left beside another one
        others = [Upload(3 * LIMIT), Upload(LIMIT)]
        tasks = [
            asyncio.create_task(reader.read(upload.request, lambda body: body))
            for upload in (first, *others)
        ]
        await settle()
        assert reader.held_nbytes == 3 * LIMIT
        tasks[1].cancel()
        await settle()
        assert reader.held_nbytes == 4 * LIMIT
        first.arrive()
        others[1].arrive()
        assert await tasks[0] == await tasks[2] == {}
        assert reader.held_nbytes == 0

    run(story)


def test_a_refusal_does_not_keep_the_body() -> None:
    class Kept(dict[str, object]):
        """Can be referred to weakly."""

    made: list[weakref.ref[Kept]] = []

    def check(body: JsonObject) -> JsonObject:
        held = Kept(body)
        made.append(weakref.ref(held))
        try:
            raise KeyError(held)
        except KeyError as exc:
            raise RequestError("refused") from exc

    async def story(reader: BodyReader) -> None:
        upload = Upload(LIMIT)
        upload.arrive()
        with pytest.raises(RequestError, match="refused") as refused:
            await reader.read(upload.request, check)
        gc.collect()
        assert refused.value.__traceback__ is not None  # it lives, and
        assert made[0]() is None

    run(story)


def test_a_text_that_no_prompt_can_have_is_refused_before_the_body_is_parsed() -> None:
    async def story() -> None:
        reader = BodyReader(LIMIT, lambda: 1000)
        body = b'{"text": "' + b"a" * LARGE_BODY_NBYTES + b"no JSON at all"
        with pytest.raises(RequestError, match="is not JSON"):
            await reader.read(upload_of(body), lambda fields: fields)
        with pytest.raises(
            RequestError, match=r"at least \d+ characters; prompts have at most 1000"
        ):
            await reader.read(upload_of(body + b'"}'), lambda fields: fields)

    asyncio.run(asyncio.wait_for(story(), 60))
