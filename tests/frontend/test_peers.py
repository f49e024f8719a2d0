"""GET, POST and DELETE /peers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.config import Role
from common.frontend.apis import sglang_api
from common.frontend.peers import sources
from tests.frontend.frontend_rig import BASE_PARTS, Rig, run_with_rig
from tests.frontend.scripted_scheduler import PEER

FLAG, OTHER = PEER.address, "10.0.0.2:8998"


async def peers_of(rig: Rig) -> dict[str, Any]:
    reply = await rig.http.get("/peers")
    assert reply.status_code == 200
    return {peer["address"]: peer for peer in reply.json()["peers"]}


def test_every_address_is_shown_with_its_state_and_who_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(look: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(sources, "in_thread", never)  # the test says what is found

    async def story(rig: Rig) -> None:
        named = msgspec.structs.replace(PEER, address="10.0.0.9:8998")
        leaving = msgspec.structs.replace(PEER, address="10.0.0.8:8998", state="leaving")
        rig.scheduler.peers = [PEER, named, leaving]
        rig.context.peers.note_found("dns:p:8998", [OTHER], is_strict=False)
        found = await peers_of(rig)
        assert {address: peer["sources"] for address, peer in found.items()} == {
            FLAG: ["flag"],
            named.address: ["request"],
            leaving.address: [],
            OTHER: ["dns:p:8998"],
        }
        info = (await rig.http.get("/server_info")).json()["peers"][0]
        assert info.items() <= found[FLAG].items()
        assert (found[OTHER]["state"], found[OTHER]["detail"]) == ("connecting", "not dialled yet")
        rig.scheduler.peers = [PEER, msgspec.structs.replace(PEER, address=OTHER)]
        rig.context.peers.note_found("dns:p:8998", [], is_strict=False)
        found = await peers_of(rig)
        assert found[OTHER]["sources"] == ["dns:p:8998"] and found[OTHER]["is_lapsed"]
        assert not found[FLAG]["is_lapsed"]
        reply = await rig.http.get("/peers")
        assert reply.json()["problems"] == {"dns:p:8998": "names no prefill server at the moment"}

    run_with_rig(tmp_path, story, prefill=(FLAG, "dns:p:8998"))


def test_an_operator_adds_and_removes(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for _ in range(2):
            reply = await rig.http.post("/peers", json={"address": "10.0.0.2:08998"})
            assert (reply.status_code, reply.json()) == (
                200,
                {"success": True, "address": OTHER, "sources": ["admin"]},
            )
        await rig.until(lambda s: s.wanted == {FLAG: True, OTHER: True})
        reply = await rig.http.delete("/peers", params={"address": OTHER})
        assert (reply.status_code, reply.json()["sources"]) == (200, [])
        reply = await rig.http.delete("/peers", params={"address": FLAG})
        assert (reply.status_code, reply.json()["sources"]) == (200, ["flag"])
        await rig.until(lambda s: s.wanted == {} and len(s.seen) > 3)
        rig.scheduler.peers = []
        found = await peers_of(rig)
        assert {one: peer["state"] for one, peer in found.items()} == {FLAG: "removed"}
        reply = await rig.http.delete("/peers", params={"address": FLAG})
        assert reply.status_code == 404 and FLAG in reply.json()["error"]["message"]
        await rig.http.post("/peers", json={"address": FLAG})
        await rig.until(lambda s: s.wanted == {FLAG: True})

    run_with_rig(tmp_path, story)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "address"),
        ({"address": 7}, "address=7"),
        ({"address": ""}, "address '': must be host:port"),
        ({"address": "10.0.0.1"}, "address '10.0.0.1': must be host:port"),
        ({"address": "10.0.0.1:0"}, "1..65535"),
        ({"address": "dns:p:8998"}, "an IPv6 address must stand in brackets"),
        ({"address": "a b:1"}, "must be an IP address or a DNS name"),
    ],
)
def test_what_is_no_address_is_400(tmp_path: Path, body: dict[str, object], words: str) -> None:
    async def story(rig: Rig) -> None:
        reply = await rig.http.post("/peers", json=body)
        assert reply.status_code == 400 and words in reply.json()["error"]["message"]
        asked = {key: str(value) for key, value in body.items() if value != 7}
        reply = await rig.http.delete("/peers", params=asked)
        assert reply.status_code == 400 and "address" in reply.json()["error"]["message"]

    run_with_rig(tmp_path, story)


@pytest.mark.parametrize(
    ("role", "words"),
    [(Role.PREFILL, "a prefill server dials nobody"), (Role.DECODE, "--prefill none")],
)
def test_a_server_that_dials_nobody_says_so(tmp_path: Path, role: Role, words: str) -> None:
    async def story(rig: Rig) -> None:
        assert (await peers_of(rig))[FLAG]["state"] == "connected"
        for reply in (
            await rig.http.post("/peers", json={"address": OTHER}),
            await rig.http.delete("/peers", params={"address": FLAG}),
        ):
            assert reply.status_code == 400 and words in reply.json()["error"]["message"]

    run_with_rig(tmp_path, story, role=role, prefill=())


def test_requests_may_name_what_is_wanted_and_are_sent_to_the_only_one(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body = {"input_ids": [1], "bootstrap_room": 1, "bootstrap_host": "10.0.0.2"}
        assert (await rig.http.post("/generate", json=body)).status_code == 403
        await rig.http.post("/peers", json={"address": OTHER})
        await rig.http.delete("/peers", params={"address": FLAG})
        short = {"max_new_tokens": 1}
        body |= {"sampling_params": short}
        assert (await rig.http.post("/generate", json=body)).status_code == 200
        body = {"input_ids": [1], "bootstrap_room": 2, "sampling_params": short}
        assert (await rig.http.post("/generate", json=body)).status_code == 200
        for submit in rig.scheduler.submits:
            assert submit.bootstrap is not None
            assert (submit.bootstrap.host, submit.bootstrap.port) == ("10.0.0.2", 8998)

    parts = (*BASE_PARTS, sglang_api.build_router)
    run_with_rig(tmp_path, story, parts=parts, bootstrap_allow=())
