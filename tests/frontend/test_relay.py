"""Requests that another server answers: over real HTTP between whole frontends with scripted
schedulers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from common.clock import SystemClock
from common.config import Role
from common.frontend.apis.fleet_api import ResumeRun
from common.frontend.bodies.resume import resume_body
from common.frontend.requests import relay
from common.frontend.requests.draining import Drain
from common.frontend.requests.request_handle import RequestHandle
from common.protocol.frontend import Failed, PeerState, Submit, Tokens, ToldFrontend
from common.request import Bootstrap, SamplingParams
from tests.frontend.frontend_rig import Rig, decode_config, open_rig
from tests.frontend.generate_rig import PARTS, Served, counted_up, events_of, serve_http
from tests.frontend.scripted_scheduler import INFO, ScriptedScheduler, count_up

PROMPT = [5, 6]
COUNT = 9
STORY_TIMEOUT_S = 60.0
pytestmark = pytest.mark.slow
KEY = "the-fleet's-key"


@dataclass(frozen=True, slots=True)
class Other:
    """Another server of the fleet."""

    rig: Rig
    served: Served

    @property
    def scheduler(self) -> ScriptedScheduler:
        return self.rig.scheduler


@asynccontextmanager
async def frontend(
    directory: Path, name: str, *, role: Role = Role.DECODE, **changes: object
) -> AsyncIterator[Rig]:
    directory = directory / name
    directory.mkdir()

    def prepare(scheduler: ScriptedScheduler) -> None:
        scheduler.info = msgspec.structs.replace(INFO, incarnation=name)

    prefill = () if role is Role.PREFILL else ("127.0.0.1:8998",)
    config = decode_config(directory, role=role, prefill=prefill, **changes)
    async with open_rig(config, PARTS, SystemClock(), prepare) as rig:
        yield rig


@asynccontextmanager
async def other(directory: Path, name: str, **changes: object) -> AsyncIterator[Other]:
    async with frontend(directory, name, **changes) as rig, serve_http(rig) as served:
        yield Other(rig, served)


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(STORY_TIMEOUT_S):
            await story()

    asyncio.run(bounded())


def submit(rig: Rig, rid: str = "r", bootstrap: Bootstrap | None = None) -> RequestHandle:
    sampling = SamplingParams(max_new_tokens=COUNT, seed=1)
    return rig.context.submit(PROMPT, sampling, rid=rid, bootstrap=bootstrap)


async def have(handle: RequestHandle, count: int) -> None:
    while len(handle.output_ids) < count:
        await asyncio.sleep(0)


async def begun(rig: Rig, rid: str, count: int) -> RequestHandle:
    """A stream of which some tokens have come, and no more will."""
    rig.scheduler.holds = True
    handle = submit(rig, rid)
    await rig.until(lambda s: handle.request_id in s.held)
    rig.scheduler.send(Tokens(handle.request_id, counted_up(PROMPT, count)))
    await have(handle, count)
    return handle


async def tokens_of(handle: RequestHandle) -> list[int]:
    messages = [message async for message in handle]
    assert all(isinstance(message, Tokens) for message in messages), messages
    return [token for one in messages if isinstance(one, Tokens) for token in one.token_ids]


async def failure_of(handle: RequestHandle) -> Failed:
    *_, last = [message async for message in handle]
    assert isinstance(last, Failed)
    return last


def drain_of(rig: Rig) -> Drain:
    context = rig.context
    return Drain(context.config, context.scheduler, context.relays, context.fleet, context.clock)


def body(output_ids: list[int], rid: str = "r") -> dict[str, object]:
    sampling = SamplingParams(max_new_tokens=COUNT, seed=1, return_logprob=True)
    return {**resume_body(rid, PROMPT, output_ids, sampling, 30.0, b"")}


def refuse(submit: Submit) -> list[ToldFrontend]:
    return [Failed(submit.request_id, 503, "overloaded", "others wait", retry_after_s=7.0)]


# ---- POST /resume --------------------------------------------------------------------------------


def test_resume_answers_with_the_schedulers_messages(tmp_path: Path) -> None:
    async def story() -> None:
        async with other(tmp_path, "b") as b:
            reply = await b.rig.http.post("/resume", json=body(counted_up(PROMPT, 4)))
            assert reply.status_code == 200, reply.text
            events = events_of(reply.text)
            told = [msgspec.convert(event, Tokens) for event in events]
            tokens = [token for one in told for token in one.token_ids]
            assert tokens == counted_up(PROMPT, COUNT)[4:]
            assert told[0].offset == 4 and told[0].logprobs and told[-1].finish is not None
            assert told[-1].trace is not None
            (asked,) = b.scheduler.submits
            assert asked.output_ids == counted_up(PROMPT, 4) and asked.bootstrap is None

    run(story)


def test_what_fails_is_told_in_the_stream(tmp_path: Path) -> None:
    async def story() -> None:
        async with other(tmp_path, "b") as b:
            b.scheduler.answer = refuse
            reply = await b.rig.http.post("/resume", json=body([]))
            (event,) = events_of(reply.text)
            failed = msgspec.convert(event, Failed)
            assert (failed.kind, failed.retry_after_s) == ("overloaded", 7.0)

    run(story)


@pytest.mark.parametrize(
    ("changes", "status", "problem"),
    [
        ({"token_ids": [999]}, 400, "token_ids[0]=999"),
        ({"output_ids": [1] * COUNT}, 400, "must be fewer"),
        ({"grammar": {"kind": "regex", "text": "(("}}, 400, "grammar"),
        ({"grammar": {"kind": "regex", "text": "a+"}, "output_ids": [40]}, 400, "grammar"),
        ({"rid": "open"}, 400, "still open"),
    ],
)
def test_what_resume_can_not_follow_is_refused(
    tmp_path: Path, changes: dict[str, object], status: int, problem: str
) -> None:
    async def story() -> None:
        async with other(tmp_path, "b") as b:
            await begun(b.rig, "open", 1)
            reply = await b.rig.http.post("/resume", json=body([]) | changes)
            assert reply.status_code == status and problem in reply.text, reply.text

    run(story)


def test_a_prefill_server_resumes_nothing_and_a_draining_one_neither(tmp_path: Path) -> None:
    async def story() -> None:
        async with frontend(tmp_path, "p", role=Role.PREFILL) as p, frontend(tmp_path, "b") as b:
            reply = await p.http.post("/resume", json=body([]))
            assert reply.status_code == 400 and "prefill server" in reply.text
            b.context.scheduler.begin_drain()
            reply = await b.http.post("/resume", json=body([]))
            assert reply.status_code == 503 and "stopping" in reply.text

    run(story)


@pytest.mark.parametrize("path", ["/resume", "/drain"])
def test_they_ask_for_an_admin_key(tmp_path: Path, path: str) -> None:
    async def story() -> None:
        keys = {"api_keys": ("a-clients",), "admin_api_keys": (KEY,)}
        async with frontend(tmp_path, "b", **keys) as b:
            for shown, status in (("", 401), ("a-clients", 401), (KEY, 200)):
                headers = {"Authorization": f"Bearer {shown}"} if shown else {}
                sent = body([]) if path == "/resume" else {}
                reply = await b.http.post(path, json=sent, headers=headers)
                assert reply.status_code == status, reply.text

    run(story)


def test_who_hangs_up_ends_it_there(tmp_path: Path) -> None:
    async def story() -> None:
        async with other(tmp_path, "b") as b:
            b.scheduler.holds = True
            async with b.served.http.stream("POST", "/resume", json=body([])) as reply:
                assert reply.status_code == 200
                (asked,) = b.scheduler.submits
            await b.rig.until(lambda s: [c.request_id for c in s.cancels] == [asked.request_id])

    run(story)


# ---- drains --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_keyed", [True, False])
def test_a_drain_moves_what_waits_and_what_would_be_cut(tmp_path: Path, is_keyed: bool) -> None:
    keys = {"admin_api_keys": (KEY,), "api_keys": ("x",)} if is_keyed else {}

    async def story() -> None:
        async with (
            other(tmp_path, "b", **keys) as b,
            frontend(
                tmp_path,
                "a",
                drain_to=(b.served.url,),
                drain_timeout_s=0.5,
                relay_timeout_s=30.0,
                **keys,
            ) as a,
        ):
            stream, waits = await begun(a, "stream", 3), submit(a, "waits")
            routed = submit(a, "routed", Bootstrap("host", 1, 7))
            await a.until(lambda s: len(s.held) == 3)
            await drain_of(a).run(must_move=False)
            assert await tokens_of(stream) == counted_up(PROMPT, COUNT)
            assert await tokens_of(waits) == counted_up(PROMPT, COUNT)
            end = await failure_of(routed)
            assert (end.kind, end.status) == ("stopping", 503)
            assert [one.origin.rid for one in b.scheduler.submits] == ["waits", "stream"]
            assert b.scheduler.submits[1].output_ids == counted_up(PROMPT, 3)
            moved = [one.request_id for one in a.scheduler.cancels if one.is_moved]
            by_rid = {one.origin.rid: one.request_id for one in a.scheduler.submits}
            assert moved == [by_rid["waits"], by_rid["stream"]]

    run(story)


def test_without_time_for_relays_and_without_being_told_nothing_moves(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            other(tmp_path, "b") as b,
            frontend(tmp_path, "a", drain_to=(b.served.url,), drain_timeout_s=0.1) as a,
        ):
            stream = await begun(a, "stream", 3)
            await drain_of(a).run(must_move=False)
            assert (await failure_of(stream)).kind == "stopping"
            assert b.scheduler.submits == []

    run(story)


@pytest.mark.parametrize("obstacle", ["refuses", "has another model", "is not there", "drains"])
def test_what_nobody_takes_goes_on_here(tmp_path: Path, obstacle: str) -> None:
    async def story() -> None:
        async with other(tmp_path, "b") as b:
            url = "http://127.0.0.1:1" if obstacle == "is not there" else b.served.url
            match obstacle:
                case "refuses":
                    b.scheduler.answer = refuse
                case "has another model":
                    known = b.rig.context.scheduler.server_info
                    assert known is not None
                    b.rig.context.scheduler.server_info = msgspec.structs.replace(
                        known, fingerprint={"dtype": "float64"}
                    )
                case "drains":
                    b.rig.context.scheduler.begin_drain()
            async with frontend(
                tmp_path, "a", drain_to=(url,), drain_timeout_s=30.0, relay_timeout_s=1.0
            ) as a:
                a.scheduler.holds = True
                waits = submit(a, "waits")
                await a.until(lambda s: bool(s.held))
                a.scheduler.holds = False
                draining = asyncio.create_task(drain_of(a).run(must_move=False))
                if obstacle != "refuses":
                    await asyncio.to_thread(a.scheduler.wait_for, lambda s: len(s.seen) > 3)
                    a.scheduler.release()
                assert await tokens_of(waits) == counted_up(PROMPT, COUNT)
                await draining
                count = 2 if obstacle == "refuses" else 1
                assert len(a.scheduler.submits) == count

    run(story)


def test_the_least_loaded_server_is_asked_first_and_then_the_next(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            other(tmp_path, "b") as b,
            other(tmp_path, "c") as c,
            frontend(
                tmp_path,
                "a",
                drain_to=(c.served.url, b.served.url),
                drain_timeout_s=30.0,
                relay_timeout_s=30.0,
            ) as a,
        ):
            b.scheduler.queues, b.scheduler.answer = {"running": 0}, refuse
            c.scheduler.queues = {"running": 3}
            a.scheduler.holds = True
            waits = submit(a, "waits")
            await a.until(lambda s: bool(s.held))
            await drain_of(a).run(must_move=False)
            assert await tokens_of(waits) == counted_up(PROMPT, COUNT)
            assert len(b.scheduler.submits) == len(c.scheduler.submits) == 1
            assert len(a.scheduler.submits) == 1

    run(story)


def stops_after(count: int) -> Callable[[Submit], list[ToldFrontend]]:
    return lambda submit: count_up(submit)[:count]


def test_what_breaks_off_goes_on_at_the_next_behind_what_has_come(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            other(tmp_path, "c") as c,
            frontend(tmp_path, "a", drain_timeout_s=30.0, relay_timeout_s=30.0) as a,
        ):
            c.scheduler.queues = {"running": 3}
            stream = await begun(a, "stream", 2)
            async with other(tmp_path, "b") as b:
                b.scheduler.queues, b.scheduler.answer = {"running": 0}, stops_after(3)
                a.context.fleet.targets = (b.served.url, c.served.url)
                await a.context.fleet.look()
                a.context.relays.move(stream)
                await have(stream, 5)
                b.rig.context.scheduler.stop()
            assert await tokens_of(stream) == counted_up(PROMPT, COUNT)
            (asked,) = c.scheduler.submits
            assert asked.output_ids == counted_up(PROMPT, 5)

    run(story)


def test_a_server_that_falls_silent_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a machine that has lost its power: its connection stays, and nothing comes."""
    monkeypatch.setattr(relay, "SILENCE_MAX_S", 0.3)

    async def story() -> None:
        async with (
            other(tmp_path, "b") as b,
            frontend(tmp_path, "a", drain_to=(b.served.url,)) as a,
        ):
            b.scheduler.holds = True  # its next empty line comes too late
            stream = await begun(a, "stream", 2)
            a.scheduler.holds = False
            a.context.relays.may_go_on_here = True
            a.context.relays.move(stream)
            assert await tokens_of(stream) == counted_up(PROMPT, COUNT)
            await b.rig.until(lambda s: len(s.cancels) == 1)

    run(story)


def test_a_server_that_waits_says_that_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "SILENCE_MAX_S", 2.0)
    monkeypatch.setattr("common.frontend.apis.fleet_api.PULSE_S", 0.2)
    said: list[bytes] = []
    events = ResumeRun.events

    async def counted(run: ResumeRun) -> AsyncGenerator[bytes, None]:
        async for chunk in events(run):
            said.append(chunk)
            yield chunk

    monkeypatch.setattr(ResumeRun, "events", counted)

    async def story() -> None:
        async with (
            other(tmp_path, "b") as b,
            frontend(tmp_path, "a", drain_to=(b.served.url,)) as a,
        ):
            b.scheduler.holds = True
            stream = await begun(a, "stream", 2)
            a.context.relays.move(stream)
            await b.rig.until(lambda s: bool(s.held))
            while len(said) < 11:  # longer than it may be silent
                await asyncio.sleep(0)
            b.scheduler.release()
            assert await tokens_of(stream) == counted_up(PROMPT, COUNT)
            assert len(b.scheduler.submits) == 1 and len(a.scheduler.submits) == 1

    run(story)


@pytest.mark.parametrize(
    ("leaves", "kind"), [(True, "aborted"), (False, "stopping")], ids=["client leaves", "stops"]
)
def test_what_is_relayed_ends_there_with_its_client_and_with_its_server(
    tmp_path: Path, leaves: bool, kind: str
) -> None:
    async def story() -> None:
        async with (
            other(tmp_path, "b") as b,
            frontend(tmp_path, "a", drain_to=(b.served.url,)) as a,
        ):
            b.scheduler.holds = True
            stream = await begun(a, "stream", 2)
            a.context.relays.move(stream)
            await b.rig.until(lambda s: bool(s.held))
            if leaves:
                with stream:
                    pass
            else:
                a.context.scheduler.stop()
            end = await failure_of(stream)
            assert end.kind == kind and (not leaves or end.message == "the client went away")
            await b.rig.until(lambda s: len(s.cancels) == 1)
            assert a.context.scheduler.open_request_count == 0

    run(story)


# ---- POST /drain ---------------------------------------------------------------------------------


def test_drain_tells_the_first_process_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with frontend(tmp_path, "a", relay_timeout_s=5.0) as a:
            told: list[str] = []
            a.context.drain_order.tell = lambda: told.append("SIGTERM")
            reply = await a.http.post("/drain", json={"to": ["b:30001", "https://c.example"]})
            assert reply.status_code == 200, reply.text
            assert a.context.fleet.targets == ("http://b:30001", "https://c.example:443")
            assert a.context.drain_order.must_move
            assert (await a.http.post("/drain", json={})).status_code == 200
            assert (await a.http.post("/drain")).status_code == 200
            again = await a.http.post("/drain", json={"to": ["d:1"]})
            assert again.status_code == 400 and "drains already" in again.text
            assert told == ["SIGTERM"]

    run(story)


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ({"to": []}, "to=[]: must be a list of URLs, not empty"),
        ({"to": "http://b:1"}, "to="),
        ({"to": [7]}, "to="),
        ({"to": ["ftp://b"]}, "to[0]='ftp://b': must be a URL"),
        ({"to": ["http://b:1/path"]}, "to[0]"),
        ({"to": ["http://user@b:1"]}, "to[0]"),
        ({"to": ["http://b:99999"]}, "to[0]"),
        ({"to": ["http://b:0"]}, "to[0]"),
        ({"to": ["http://b c:1"]}, "to[0]"),
        ({"to": ["b:1"] * 65}, "to="),
    ],
)
def test_drain_refuses_what_is_no_server(
    tmp_path: Path, sent: dict[str, object], problem: str
) -> None:
    async def story() -> None:
        async with frontend(tmp_path, "a") as a:
            told: list[str] = []
            a.context.drain_order.tell = lambda: told.append("SIGTERM")
            reply = await a.http.post("/drain", json=sent)
            assert reply.status_code == 400 and problem in reply.json()["error"]["message"]
            assert told == [] and not a.context.drain_order.is_given

    run(story)


# ---- --serve-plain -------------------------------------------------------------------------------


@asynccontextmanager
async def plain_pair(directory: Path) -> AsyncIterator[tuple[Rig, Other]]:
    """A prefill server that answers plain requests, and the decode server that it knows."""
    async with (
        other(directory, "b") as b,
        frontend(directory, "p", role=Role.PREFILL, serve_plain=True) as p,
    ):
        address = b.served.url.removeprefix("http://")
        p.scheduler.peers = [
            PeerState("", "b", "connected", http_address=address),
            PeerState("", "x", "connected", http_address="no address at all"),
            PeerState("", "y", "lost", http_address="127.0.0.1:1"),
            PeerState("", "z", "connected", http_address="no..name:1"),
        ]
        await p.context.scheduler.get_state()
        await p.context.fleet.look()
        yield p, b


PLAIN = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": COUNT}}


def test_a_plain_request_is_answered_by_a_decode_server(tmp_path: Path) -> None:
    async def story() -> None:
        async with plain_pair(tmp_path) as (p, b):
            direct = (await b.rig.http.post("/generate", json=PLAIN)).json()
            reply = await p.http.post("/generate", json=PLAIN)
            assert reply.status_code == 200, reply.text
            for name in ("text", "output_ids"):
                assert reply.json()[name] == direct[name]
            assert reply.json()["meta_info"]["finish_reason"] == {"type": "length", "length": COUNT}
            assert p.scheduler.submits == []

    run(story)


def test_streams_samples_and_log_probabilities_come_as_from_the_decode_server(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with plain_pair(tmp_path) as (p, b):
            options = {"max_new_tokens": COUNT, "n": 2, "sampling_seed": 3, "temperature": 0.5}
            asked = {
                "input_ids": PROMPT,
                "sampling_params": options,
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": 2,
            }
            direct = (await b.rig.http.post("/generate", json=asked)).json()
            relayed = (await p.http.post("/generate", json=asked)).json()
            known = list(b.scheduler.submits[:2])
            there = sorted(b.scheduler.submits[2:], key=lambda one: one.origin.rid)
            assert [one.sampling for one in there] == [one.sampling for one in known]
            for ours, theirs in zip(relayed, direct, strict=True):
                assert ours["output_ids"] == theirs["output_ids"]
                for name in ("input_token_logprobs", "output_top_logprobs"):
                    assert ours["meta_info"][name] == theirs["meta_info"][name]
            reply = await p.http.post("/generate", json={**PLAIN, "stream": True})
            assert events_of(reply.text)[-1]["output_ids"] == counted_up(PROMPT, COUNT)
            chat = {"prompt": PROMPT, "max_tokens": 3}
            assert (await p.http.post("/v1/completions", json=chat)).status_code == 200

    run(story)


def test_what_no_decode_server_takes_is_one_error(tmp_path: Path) -> None:
    async def story() -> None:
        async with plain_pair(tmp_path) as (p, b):
            b.scheduler.answer = refuse
            reply = await p.http.post("/generate", json=PLAIN)
            assert reply.status_code == 503 and "others wait" in reply.text
            assert reply.headers["retry-after"] == "7"
            b.rig.context.scheduler.begin_drain()
            p.context.fleet._looked_at = -9.0
            await p.context.fleet.look()
            reply = await p.http.post("/generate", json=PLAIN)
            assert reply.status_code == 503 and "no decode server is connected" in reply.text

    run(story)


def test_halves_of_routed_requests_are_its_own_still(tmp_path: Path) -> None:
    async def story() -> None:
        async with plain_pair(tmp_path) as (p, b):
            for more in (
                {"bootstrap_room": 7},
                {"kv_transfer_params": {"do_remote_decode": True}},
            ):
                assert (await p.http.post("/generate", json=PLAIN | more)).status_code == 200
            assert len(p.scheduler.submits) == 2 and b.scheduler.submits == []
            wrong = {"kv_transfer_params": {"do_remote_prefill": True}}
            assert (await p.http.post("/generate", json=PLAIN | wrong)).status_code == 400
            lonely = {"bootstrap_host": "somewhere"}
            assert (await p.http.post("/generate", json=PLAIN | lonely)).status_code == 400

    run(story)


def test_without_the_flag_a_plain_request_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with frontend(tmp_path, "p", role=Role.PREFILL) as p:
            reply = await p.http.post("/generate", json=PLAIN)
            assert reply.status_code == 400 and "bootstrap_room" in reply.text

    run(story)
