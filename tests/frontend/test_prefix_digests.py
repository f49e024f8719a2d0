"""Beginnings of prompts have names that both servers share, and that nobody shares under a salt."""

from __future__ import annotations

import threading
from collections.abc import ItemsView
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from common.config import Role
from common.errors import RequestError
from common.frontend.apis.messages_body import parse_messages
from common.frontend.apis.openai_api import parse_completion
from common.frontend.apis.openai_chat import parse_chat
from common.frontend.apis.responses_body import parse_responses
from common.frontend.bodies.fields import JsonObject, JsonValue
from common.frontend.bodies.reader import SMALL_BODY_NBYTES
from common.frontend.bodies.sample import Limits, Sample
from common.frontend.bodies.validation import parse_generate
from common.frontend.text.parsing.parsing import Parsers
from common.frontend.text.tokenizer import Tokenizer, load_tokenizer
from common.prefix_digests import DIGEST_NBYTES, extend_digests, prefix_seed
from common.request_bounds import CACHE_SALT_LENGTH_MAX
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import post, run_generate
from tests.frontend.scripted_scheduler import INFO
from tests.frontend.test_two_step_bodies import DECODE as DECODE_OF_TWO
from tests.frontend.test_two_step_bodies import FIRST, SECOND
from tests.frontend.test_two_step_bodies import PREFILL as PREFILL_OF_TWO
from tests.frontend.tiny_tokenizers import CHATML, write_tokenizer

IDS: list[JsonValue] = [*range(5, 45)]  # two whole digests, and a rest
OTHER_IDS: list[JsonValue] = [*range(6, 46)]
TEXT = "the crooked chain and the heavy necklace of Magda " * 3
FINGERPRINT = {"weights": "abc"}
LIMITS = Limits(
    vocab_size=400,
    request_token_max=4096,
    is_prefill=False,
    model_names=("tiny",),
    prefix_fingerprint=FINGERPRINT,
)
PATHS = (
    *("/generate", "/v1/completions", "/v1/chat/completions"),
    *("/v1/responses", "/v1/messages"),
)
BODIES: dict[str, JsonObject] = {
    "/generate": {"input_ids": IDS, "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("chat")
    return load_tokenizer(str(write_tokenizer(directory, chat_template=CHATML)), lambda: 0.0)


def samples_of(
    path: str, tokenizer: Tokenizer, limits: Limits = LIMITS, /, **more: JsonValue
) -> tuple[Sample, ...]:
    body = {**BODIES[path], **more}
    match path:
        case "/generate":
            return parse_generate(body, tokenizer, limits, "rid").samples
        case "/v1/completions":
            return parse_completion(body, tokenizer, limits, "name")[0].samples
        case "/v1/responses":
            return parse_responses(body, tokenizer, limits, "name", Parsers())[0].samples
        case "/v1/messages":
            return parse_messages(body, tokenizer, limits, "name", Parsers())[0].samples
        case _:
            return parse_chat(body, tokenizer, limits, "name", Parsers())[0].samples


def named(token_ids: list[int], salt: str = "") -> bytes:
    return extend_digests(prefix_seed(FINGERPRINT, salt), token_ids)


# ---- digests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("role", Role)
def test_every_api_of_both_servers_submits_the_digests_of_its_prompt(
    path: str, role: Role, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        more: JsonObject = {"bootstrap_room": 7} if role is Role.PREFILL else {}
        await post(rig, path, {**BODIES[path], **more, "cache_salt": "tenant"})
        (submit,) = rig.scheduler.submits
        seed = prefix_seed(INFO.fingerprint, "tenant")
        assert submit.prefix_digests == extend_digests(seed, submit.token_ids)
        assert len(submit.prefix_digests) >= 3 * DIGEST_NBYTES

    run_generate(tmp_path, story, role=role)


def test_samples_of_a_batch_have_the_digests_of_their_own_prompts(tokenizer: Tokenizer) -> None:
    params: JsonObject = {"n": 2, "max_new_tokens": 2}
    found = samples_of("/generate", tokenizer, input_ids=[IDS, OTHER_IDS], sampling_params=params)
    assert len(found) == 4
    assert [one.prefix_digests for one in found] == [named(one.token_ids) for one in found]
    assert found[1].prefix_digests != found[2].prefix_digests


def test_a_short_prompt_has_the_seed_alone_which_its_answer_goes_on_from(
    tokenizer: Tokenizer,
) -> None:
    (sample,) = samples_of("/generate", tokenizer, input_ids=[5, 6, 7])
    assert sample.prefix_digests == prefix_seed(FINGERPRINT)


def test_without_a_prefix_cache_no_digests_are_made_and_salts_are_checked_all_the_same(
    tmp_path: Path,
) -> None:
    async def story(rig: Rig) -> None:
        for path in PATHS:
            await post(rig, path, {**BODIES[path], "cache_salt": "tenant"})
            await post(rig, path, {**BODIES[path], "cache_salt": 5}, 400)
        assert [submit.prefix_digests for submit in rig.scheduler.submits] == [b""] * len(PATHS)

    run_generate(tmp_path, story, disable_radix_cache=True)


def test_a_health_probe_leaves_nothing_in_a_cache(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        assert (await rig.http.get("/health_generate")).status_code == 200
        assert [submit.prefix_digests for submit in rig.scheduler.submits] == [b""]

    run_generate(tmp_path, story)


class WatchedFingerprint(dict[str, str]):
    """Knows the threads that digests are begun on."""

    def __init__(self) -> None:
        super().__init__(FINGERPRINT)
        self.threads: list[int] = []

    def items(self) -> ItemsView[str, str]:  # type: ignore[override]
        self.threads.append(threading.get_ident())
        return super().items()


def test_digests_of_long_prompts_are_made_beside_the_event_loop(tmp_path: Path) -> None:
    watched = WatchedFingerprint()

    async def story(rig: Rig) -> None:
        info = rig.context.scheduler.server_info
        assert info is not None
        rig.context.scheduler.server_info = structs.replace(info, fingerprint=watched)
        long_text = "a" * SMALL_BODY_NBYTES
        await post(rig, "/generate", {**BODIES["/generate"], "unknown_key": long_text})
        await post(rig, "/generate", BODIES["/generate"])

    run_generate(tmp_path, story)
    beside, inline = watched.threads
    assert inline == threading.get_ident() != beside


# ---- salts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_prompts_under_different_salts_share_no_digest(path: str, tokenizer: Tokenizer) -> None:
    salts: list[JsonObject] = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"cache_salt": "ab", "extra_key": "c"},
        {"cache_salt": "a", "extra_key": "bc"},
        {"cache_salt": "abc"},
        {"cache_salt": "é" * CACHE_SALT_LENGTH_MAX},
    ]
    digests: set[bytes] = set()
    for salt in salts:
        (sample,) = samples_of(path, tokenizer, **salt)
        text = sample.prefix_digests
        found = {text[at : at + DIGEST_NBYTES] for at in range(0, len(text), DIGEST_NBYTES)}
        assert not found & digests, salt
        digests |= found


@pytest.mark.parametrize("path", PATHS)
def test_sglang_s_name_of_the_salt_means_the_same(path: str, tokenizer: Tokenizer) -> None:
    (of_vllm,) = samples_of(path, tokenizer, cache_salt="tenant", extra_key=None)
    (of_sglang,) = samples_of(path, tokenizer, extra_key="tenant")
    assert of_vllm.prefix_digests == of_sglang.prefix_digests
    assert of_vllm.prefix_digests == named(of_vllm.token_ids, "tenant")


def test_every_prompt_of_a_batch_may_have_a_salt_of_its_own(tokenizer: Tokenizer) -> None:
    found = samples_of(
        "/generate", tokenizer, input_ids=[IDS, IDS, IDS], cache_salt=["a", None, "b"]
    )
    salts = ("a", "", "b")
    assert [one.prefix_digests for one in found] == [named(found[0].token_ids, s) for s in salts]


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "salt", ["", 5, True, {}, ["a", "b"], [5], "a\0b", "a" * (CACHE_SALT_LENGTH_MAX + 1)]
)
def test_a_salt_that_is_none_is_refused_by_name(
    path: str, name: str, salt: JsonValue, tokenizer: Tokenizer
) -> None:
    with pytest.raises(RequestError, match=f"{name}=") as caught:
        samples_of(path, tokenizer, **{name: salt})
    assert (caught.value.status, caught.value.field) == (400, name)


# ---- both halves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_both_halves_of_a_routed_request_have_the_same_digests(
    path: str, tokenizer: Tokenizer
) -> None:
    prefill = replace(LIMITS, is_prefill=True, default_host="10.0.0.1", default_port=8998)
    decode = replace(LIMITS, default_host="10.0.0.1", default_port=8998)
    body: JsonObject = {"bootstrap_room": 7, "cache_salt": "tenant"}
    (first,) = samples_of(path, tokenizer, prefill, **body)
    (second,) = samples_of(path, tokenizer, decode, **body)
    assert first.prefix_digests == second.prefix_digests == named(first.token_ids, "tenant")


def test_both_steps_of_a_proxy_have_the_same_digests(tokenizer: Tokenizer) -> None:
    digests = [
        samples_of(
            "/v1/completions",
            tokenizer,
            replace(limits, prefix_fingerprint=FINGERPRINT),
            kv_transfer_params=params,
            cache_salt="tenant",
            prompt=[5] * 40,
        )[0].prefix_digests
        for limits, params in ((PREFILL_OF_TWO, FIRST), (DECODE_OF_TWO, SECOND))
    ]
    assert digests == [named([5] * 40, "tenant")] * 2
