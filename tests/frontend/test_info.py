"""What a server says of itself: routers and benches find the fields they read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.clock import ManualClock
from common.config import Role
from common.frontend.apis import openai_api
from common.frontend.requests.scheduler_health import SILENCE_MAX_S, STALL_MAX_S
from common.protocol.frontend import Failed, PageGroupState, PeerState, PrefixCacheState
from common.request import SamplingParams
from tests.frontend.frontend_rig import BASE_PARTS, Rig, listen, run_with_rig
from tests.frontend.scripted_scheduler import PAGES as FULL
from tests.frontend.scripted_scheduler import PEER, ScriptedScheduler

# name, is_window, page items, tokens of a page, its bytes; total, free, used, cached, quarantined
WINDOW = PageGroupState("window-8", True, 16, 16, 1024, 8, 4, 3, 0, 1)
BLOCK = PageGroupState("block-4", False, 16, 64, 1024, 8, 3, 4, 0, 1)
STATE = PageGroupState("slot", False, 1, 0, 1024, 4, 2, 2, 0, 0)


def test_health_is_200_when_ready_and_asks_nobody(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.is_silent = True
        for path in ("/health", "/ready", "/ping"):
            assert (await rig.http.get(path)).status_code == 200, path

    run_with_rig(tmp_path, story)


def test_health_is_503_with_the_reason_while_no_peer_can_be_used(tmp_path: Path) -> None:
    def refused(scheduler: ScriptedScheduler) -> None:
        scheduler.is_ready = False
        scheduler.peers = [PeerState("127.0.0.1:8998", "abc", "refused", detail="dtype: ...")]

    async def story(rig: Rig) -> None:
        reply = await rig.http.get("/health")
        assert reply.status_code == 503
        assert reply.json()["error"]["message"] == (
            "no prefill server can be used: 127.0.0.1:8998 refused (dtype: ...)"
        )
        assert reply.headers["Retry-After"] == "1"
        assert (await rig.http.get("/ping")).status_code == 200, "alive all the same"
        assert (await rig.http.get("/health_generate")).status_code == 503
        assert rig.scheduler.submits == []

    run_with_rig(tmp_path, story, prepare=refused)


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/health_generate"])
def test_health_is_503_when_the_scheduler_is_silent(tmp_path: Path, path: str) -> None:
    clock = ManualClock(100.0)

    async def story(rig: Rig) -> None:
        listen(rig.context.scheduler, clock, SILENCE_MAX_S + 1)
        reply = await rig.http.get(path)
        assert reply.status_code == 503
        assert "has not answered for 6 s" in reply.json()["error"]["message"]

    run_with_rig(tmp_path, story, clock=clock)


def test_health_is_503_when_the_engine_stands_still_with_work(tmp_path: Path) -> None:
    clock = ManualClock(100.0)

    def stall(scheduler: ScriptedScheduler) -> None:
        scheduler.is_stalled = True

    async def story(rig: Rig) -> None:
        for _ in range(int(STALL_MAX_S) + 1):
            clock.advance(1.0)
            await rig.context.scheduler.get_state()
        assert (await rig.http.get("/health")).status_code == 503
        rig.scheduler.step_count += 1
        await rig.context.scheduler.get_state()
        reply = await rig.http.get("/health")
        assert (reply.status_code, reply.json()["step_count"]) == (200, 1)

    run_with_rig(tmp_path, story, clock=clock, prepare=stall)


def test_health_stays_while_the_engine_takes_steps(tmp_path: Path) -> None:
    """What long searches stand on: a server that is given up answers everything alike."""
    clock = ManualClock(100.0)

    async def story(rig: Rig) -> None:
        for _ in range(3):
            clock.advance(STALL_MAX_S - 1)
            await rig.context.scheduler.get_state()
            assert (await rig.http.get("/health")).status_code == 200

    run_with_rig(tmp_path, story, clock=clock)


def test_health_generate_generates_one_token_that_no_metric_counts(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        assert (await rig.http.get("/health_generate")).status_code == 200
        (submit,) = rig.scheduler.submits
        assert submit.sampling == SamplingParams(
            max_new_tokens=1, seed=0, temperature=0.0, ignore_eos=True
        )
        text = (await rig.http.get("/metrics")).text
        counts = re.findall(r"^sglang:num_requests_total\{.*\} (\S+)$", text, re.MULTILINE)
        assert counts == ["0.0", "0.0"], "streamed and not"
        assert "sglang:time_to_first_token_seconds_count{" not in text

    run_with_rig(tmp_path, story)


def test_health_generate_is_503_when_the_pair_can_not_generate(tmp_path: Path) -> None:
    def fail(scheduler: ScriptedScheduler) -> None:
        scheduler.answer = lambda s: [Failed(s.request_id, 500, "transfer_failed", "tcp: reset")]

    async def story(rig: Rig) -> None:
        reply = await rig.http.get("/health_generate")
        assert reply.status_code == 503
        assert "tcp: reset" in reply.json()["error"]["message"]

    run_with_rig(tmp_path, story, prepare=fail)


def test_a_prefill_server_answers_health_generate_without_a_request(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        assert (await rig.http.get("/health_generate")).status_code == 200
        assert rig.scheduler.submits == []
        assert (await rig.http.get("/server_info")).json()["disaggregation_mode"] == "prefill"

    run_with_rig(tmp_path, story, role=Role.PREFILL, prefill=())


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_has_what_routers_lift_and_operators_want(tmp_path: Path, path: str) -> None:
    async def story(rig: Rig) -> None:
        body = (await rig.http.get(path)).json()
        model_path = str(tmp_path / "tiny")
        assert body["served_model_name"] == "tiny"
        assert body["model_path"] == model_path and body["tokenizer_path"] == model_path
        assert (body["tp_size"], body["dp_size"], body["page_size"]) == (1, 1, 16)
        assert body["disaggregation_mode"] == "decode"
        assert body["model_type"] == "qwen3" and body["architectures"] == ["Qwen3ForCausalLM"]
        assert (body["version"], body["status"]) == ("0.test", "ready")
        assert body["max_total_num_tokens"] == 4096
        assert body["max_running_requests"] == 96, "in use, none were asked for"
        assert body["ucx"] == "auto", "the setting"
        assert body["ucx_in_use"] == [{"ucx_version": "1.22.0", "ucx_origin": "wheel"}]
        assert body["peers"][0]["transports"] == PEER.transports
        assert body["peers"][0]["in_flight_count"] == 0, "zeros are said too"
        (group,) = body["page_groups"]
        assert (group["name"], group["total"], group["quarantined"]) == ("full", 256, 6)
        assert (group["page_nbytes"], group["token_nbytes"]) == (4096, 256)
        assert body["internal_states"][0]["queues"]["transfer"] == 3
        assert body["workers"][0]["rank"] == "0"

    run_with_rig(tmp_path, story)


def test_a_server_alone_says_its_mode_as_sglang_does(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        assert (await rig.http.get("/model_info")).json()["disaggregation_mode"] == "null"

    run_with_rig(tmp_path, story, prefill=())


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info_has_sglang_s_fields(tmp_path: Path, path: str) -> None:
    async def story(rig: Rig) -> None:
        assert set((await rig.http.get(path)).json()) == {
            "model_path",
            "served_model_name",
            "tokenizer_path",
            "is_generation",
            "preferred_sampling_params",
            "weight_version",
            "load_format",
            "reasoning_parser",
            "tool_call_parser",
            "disaggregation_mode",
            "has_image_understanding",
            "has_audio_understanding",
            "model_type",
            "architectures",
        }

    run_with_rig(tmp_path, story)


def test_models_lists_the_served_one_and_finds_no_other(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body = (await rig.http.get("/v1/models")).json()
        assert body["object"] == "list"
        (card,) = body["data"]
        assert card["id"] == "org/tiny" and card["object"] == "model"
        assert card["max_model_len"] == 512 and card["owned_by"] == "baton"
        assert isinstance(card["created"], int)
        assert (await rig.http.get("/v1/models/org/tiny")).json() == card
        missing = await rig.http.get("/v1/models/other")
        assert missing.status_code == 404
        assert missing.json() == {
            "error": {
                "message": "model 'other' is not served here; 'org/tiny' is",
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }
        }

    run_with_rig(tmp_path, story, served_model_name="org/tiny")


def test_the_model_is_found_under_every_name_that_bodies_may_say(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        path = rig.context.config.model_path
        cards = (await rig.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["first", "org/second"]
        parent = Path(path).parent.name
        for name, called in (
            ("first", "first"),
            ("org/second", "org/second"),
            (path, "first"),
            ("tiny", "first"),
            (f"{parent}/tiny", "first"),
            ("default", "first"),
        ):
            reply = await rig.http.get(f"/v1/models/{name}")
            assert (reply.status_code, reply.json()["id"]) == (200, called), name
            body = {"prompt": "a", "max_tokens": 1, "model": name}
            answer = await rig.http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["model"]) == (200, "first"), name
        for name in ("second", "tin", "/tiny", f"other/{path}", "first,org/second"):
            assert (await rig.http.get(f"/v1/models/{name}")).status_code == 404, name
            body = {"prompt": "a", "max_tokens": 1, "model": name}
            assert (await rig.http.post("/v1/completions", json=body)).status_code == 404, name

    parts = (*BASE_PARTS, openai_api.build_router)
    names = {"served_model_name": "first", "model_aliases": ("org/second",)}
    run_with_rig(tmp_path, story, parts=parts, **names)


def test_get_load_is_an_array_that_routers_sum(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        (entry,) = (await rig.http.get("/get_load")).json()
        assert entry["num_tokens"] == (50 + 6) * 16
        assert (entry["dp_rank"], entry["num_waiting_reqs"]) == (0, 2)
        (load,) = (await rig.http.get("/v1/loads")).json()["loads"]
        assert load["disaggregation"]["decode_transfer_queue_reqs"] == 3
        assert (load["max_total_num_tokens"], load["max_running_requests"]) == (4096, 96)
        assert load["token_usage"] == pytest.approx(56 / 256)

    run_with_rig(tmp_path, story)


@pytest.mark.parametrize(
    ("groups", "token_count", "used_count"),
    [
        ((STATE, FULL), 256 * 16, 56 * 16),  # a state has one page a request and limits no tokens
        ((FULL, BLOCK), 8 * 64, 5 * 64),  # the group that is full first
        ((FULL, WINDOW), 256 * 16, 56 * 16),  # a request gives the window's pages back
        ((WINDOW,), 8 * 16, 4 * 16),  # as SGLang counts where all layers have a window
        ((STATE,), 0, 0),
    ],
)
def test_the_token_count_of_a_pool_is_of_the_group_that_keeps_them(
    tmp_path: Path, groups: tuple[PageGroupState, ...], token_count: int, used_count: int
) -> None:
    def script(scheduler: ScriptedScheduler) -> None:
        scheduler.page_groups = list(groups)

    async def story(rig: Rig) -> None:
        assert (await rig.http.get("/server_info")).json()["max_total_num_tokens"] == token_count
        (load,) = (await rig.http.get("/v1/loads")).json()["loads"]
        assert load["max_total_num_tokens"] == token_count
        assert load["num_used_tokens"] == used_count
        metrics = (await rig.http.get("/metrics")).text
        assert re.search(rf"^sglang:max_total_num_tokens{{.*}} {token_count}\.0$", metrics, re.M)
        assert re.search(rf"^sglang:num_used_tokens{{.*}} {used_count}\.0$", metrics, re.M)

    run_with_rig(tmp_path, story, prepare=script)


def hold(scheduler: ScriptedScheduler) -> None:
    scheduler.holds = True


def test_abort_request_cancels_by_prefix_or_all(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        sampling = SamplingParams(max_new_tokens=1, seed=0)
        for rid in ("a-0", "a-1", "b"):
            rig.context.submit([1], sampling, rid=rid)
        reply = await rig.http.post("/abort_request", json={"rid": "a-"})
        assert reply.json() == {"success": True, "aborted_count": 2}
        await rig.until(lambda s: len(s.cancels) == 2)
        assert (await rig.http.post("/abort_request", json={"rid": "nobody"})).status_code == 200
        reply = await rig.http.post("/abort_request", json={"abort_all": True})
        await rig.until(lambda s: len(s.cancels) == 3)

    run_with_rig(tmp_path, story, prepare=hold)


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b'{"rid": ""}', b'{"rid": 5}', b'{"rid": ["a"]}', b"[]", b'{"abort_all": "yes"}'],
)
def test_an_abort_of_nothing_in_particular_is_400(tmp_path: Path, body: bytes) -> None:
    async def story(rig: Rig) -> None:
        rig.context.submit([1], SamplingParams(max_new_tokens=1, seed=0), rid="r")
        reply = await rig.http.post("/abort_request", content=body)
        assert reply.status_code == 400
        message = reply.json()["error"]["message"]
        assert any(name in message for name in ("rid", "abort_all", "the body"))
        assert rig.scheduler.cancels == []

    run_with_rig(tmp_path, story, prepare=hold)


def test_flush_cache_is_200_when_done_and_400_when_not_idle(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        reply = await rig.http.post("/flush_cache")
        assert reply.status_code == 200
        assert reply.json() == {"success": True, "message": "the cache is empty"}
        rig.scheduler.flush_answer = (False, "3 requests are running")
        reply = await rig.http.post("/flush_cache?timeout=5")
        assert reply.status_code == 400
        assert reply.json() == {"error": {"message": "3 requests are running"}}

    run_with_rig(tmp_path, story)


@pytest.mark.parametrize("role", Role)
def test_a_flush_says_whose_cache_is_empty_now_and_that_peers_keep_theirs(
    role: Role, tmp_path: Path
) -> None:
    async def story(rig: Rig) -> None:
        rig.scheduler.flush_answer = (True, "")
        message = (await rig.http.post("/flush_cache")).json()["message"]
        assert message == f"the {role} server has no prefix cached; its peers keep theirs"
        rig.scheduler.flush_answer = (False, "")
        reply = await rig.http.post("/flush_cache")
        assert reply.status_code == 400 and "in use" in reply.json()["error"]["message"]

    run_with_rig(tmp_path, story, role=role)


def test_server_info_tells_what_is_cached_of_prompts_or_why_nothing_is(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        told = (await rig.http.get("/server_info")).json()["prefix_cache"]
        assert told == {
            "token_count": 960,
            "block_tokens": 16,
            "node_count": 7,
            "checkpoint_count": 2,
            "checkpoint_max": 8,
            "digest_count": 0,
            "reason": "",
            "host_token_count": 0,
            "host_token_max": 0,
        }
        reason = "switched off by --disable-radix-cache"
        rig.scheduler.prefix_cache = PrefixCacheState(reason=reason)
        told = (await rig.http.get("/server_info")).json()["prefix_cache"]
        assert (told["reason"], told["token_count"]) == (reason, 0)
        rig.scheduler.prefix_cache = None
        assert (await rig.http.get("/server_info")).json()["prefix_cache"] is None

    run_with_rig(tmp_path, story)


@pytest.mark.parametrize("timeout", ["x", "0", "-1", "nan", "inf", "601"])
def test_a_flush_timeout_out_of_range_is_400(tmp_path: Path, timeout: str) -> None:
    async def story(rig: Rig) -> None:
        reply = await rig.http.post(f"/flush_cache?timeout={timeout}")
        assert reply.status_code == 400
        assert f"timeout={timeout!r}" in reply.json()["error"]["message"]

    run_with_rig(tmp_path, story)
