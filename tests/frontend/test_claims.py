"""How urgent a request is, and whose: the field `priority` in each API, and the client's key."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.frontend.bodies.fields import JsonObject
from common.request import NO_CLAIM, Claim
from tests.frontend.frontend_rig import Rig
from tests.frontend.generate_rig import run_generate

BODIES: dict[str, JsonObject] = {
    "/generate": {"text": "one two", "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"prompt": "one two", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one"}], "max_tokens": 2},
}
KEYS = ("sk-one", "sk-two")
LARGEST = 2**31 - 1


def bearing(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("priority", [-LARGEST, -1, 0, 3, LARGEST])
def test_the_scheduler_is_told_of_the_priority(tmp_path: Path, path: str, priority: int) -> None:
    async def story(rig: Rig) -> None:
        reply = await rig.http.post(path, json={**BODIES[path], "priority": priority})
        assert reply.status_code == 200, reply.text
        assert [one.claim for one in rig.scheduler.submits] == [Claim(priority)]

    run_generate(tmp_path, story)


@pytest.mark.parametrize("path", BODIES)
def test_without_one_it_is_0_and_null_is_none(tmp_path: Path, path: str) -> None:
    async def story(rig: Rig) -> None:
        await rig.http.post(path, json=BODIES[path])
        await rig.http.post(path, json={**BODIES[path], "priority": None})
        assert [one.claim for one in rig.scheduler.submits] == [NO_CLAIM, NO_CLAIM]

    run_generate(tmp_path, story)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (LARGEST + 1, "2147483648"),
        (-LARGEST - 1, "-2147483648"),
        (1.5, "1.5"),
        ("3", '"3"'),
        (True, "true"),
        ([1], "[1]"),
        (10**40, "10000"),
    ],
)
def test_a_priority_that_is_none_is_named(
    tmp_path: Path, path: str, value: object, shown: str
) -> None:
    async def story(rig: Rig) -> None:
        reply = await rig.http.post(path, json={**BODIES[path], "priority": value})
        assert reply.status_code == 400 and not rig.scheduler.submits
        assert f"priority={shown}" in reply.text.replace('\\"', '"')
        assert f"must be an integer in -{LARGEST}..{LARGEST}" in reply.text

    run_generate(tmp_path, story)


def test_where_low_values_are_first_schedulers_are_told_the_other_way_round(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for path, body in BODIES.items():
            await rig.http.post(path, json={**body, "priority": 7})
        assert [one.claim for one in rig.scheduler.submits] == [Claim(-7)] * len(BODIES)

    run_generate(tmp_path, story, schedule_low_priority_values_first=True)


def test_all_prompts_and_samples_of_a_body_have_its_claim(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body: JsonObject = {"text": ["one", "two"], "priority": 2, "sampling_params": {"n": 2}}
        assert (await rig.http.post("/generate", json=body)).status_code == 200
        assert [one.claim for one in rig.scheduler.submits] == [Claim(2)] * 4

    run_generate(tmp_path, story)


def test_each_key_is_a_client_of_its_own_and_is_not_told(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for path, body in BODIES.items():
            for key in KEYS:
                reply = await rig.http.post(path, json=body, headers=bearing(key))
                assert reply.status_code == 200
        clients = [one.claim.client for one in rig.scheduler.submits]
        assert clients == clients[:2] * len(BODIES) and len(set(clients)) == 2
        assert all(len(client) == 16 for client in clients)
        assert not any(key in repr(rig.scheduler.submits) for key in KEYS)
        shown = [await rig.http.get(path, headers=bearing(KEYS[0])) for path in OPENED]
        assert not any(client in reply.text for client in clients for reply in shown)

    run_generate(tmp_path, story, api_keys=KEYS)


OPENED = ("/server_info", "/requests", "/state", "/metrics", "/trace")


def test_where_no_keys_are_asked_for_all_are_one_client(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for key in KEYS:
            await rig.http.post("/generate", json=BODIES["/generate"], headers=bearing(key))
        assert [one.claim for one in rig.scheduler.submits] == [NO_CLAIM, NO_CLAIM]

    run_generate(tmp_path, story)
