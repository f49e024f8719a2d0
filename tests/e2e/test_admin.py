"""`baton-admin` on real servers: from any of them it sees all of a fleet, and it has them drain and
switch roles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.fleet import WAIT_TIMEOUT_S, Fleet, Node, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

KEY, ADMIN_KEY = "the-key-of-clients", "the-key-of-administrators"


def admin(*argv: str, code: int = 0, **environment: str) -> str:
    """What the program prints, as an operator runs it."""
    done = subprocess.run(
        [sys.executable, "-m", "common.admin", *argv],
        capture_output=True, text=True, timeout=WAIT_TIMEOUT_S, env=os.environ | environment,
    )  # fmt: skip
    shown = done.stdout + done.stderr
    assert done.returncode == code and "Traceback" not in shown, shown
    assert KEY not in shown and ADMIN_KEY not in shown
    return shown


def test_any_server_of_a_fleet_shows_all_of_it_and_a_drain_ends_one(tmp_path: Path) -> None:
    keys = ("--api-key", KEY, "--admin-api-key", ADMIN_KEY)
    with Fleet(tmp_path) as fleet:
        prefill = fleet.prefill(*keys, "--name", "p")
        decodes = [
            fleet.decode([prefill], *keys, "--name", name, name=name) for name in ("d0", "d1")
        ]
        fleet.wait_ready()
        urls = {node.server.url for node in fleet.nodes}
        for node in fleet.nodes:
            shown = json.loads(admin("fleet", node.url, "--json", BATON_API_KEY=KEY))
            assert {row["url"]: row["state"] for row in shown["servers"]} == dict.fromkeys(
                urls, "ready"
            )
            roles = {row["name"]: row["role"] for row in shown["servers"]}
            assert roles == {"p": "prefill", "d0": "decode", "d1": "decode"}
            links = {(row["from"], row["to"]) for row in shown["links"]}
            assert links == {("p", "d0"), ("p", "d1"), ("d0", "p"), ("d1", "p")}
            for row in shown["links"]:
                assert row["state"] == "connected" and row["transports"] and row["protocol"]
            for row in shown["servers"]:
                assert row["uptime_s"] > 0 and row["pool_usage"] is not None
        assert "wants a key" in admin("fleet", prefill.url, code=1)

        first, second = decodes
        refused = admin("drain", first.url, BATON_API_KEY=KEY, code=1)
        assert "does not take the key that was shown" in refused
        to = ("--to", second.server.url)
        assert "0 open requests" in admin("drain", first.url, *to, BATON_ADMIN_API_KEY=ADMIN_KEY)
        assert first.server.process.wait(WAIT_TIMEOUT_S) == 0
        fleet.nodes.remove(first)
        wait_until("its line to go", lambda: names(prefill) == {"p", "d1"})


def names(node: Node) -> set[str]:
    """Of the servers that answer."""
    shown = json.loads(admin("fleet", node.url, "--json", BATON_API_KEY=KEY))
    return {row["name"] for row in shown["servers"] if row["state"] == "ready"}


@pytest.mark.soak
def test_a_pair_changes_places_and_is_told_of_its_peers(tmp_path: Path) -> None:
    flags = ("--enable-role-switch", "--drain-timeout", "20")
    with Fleet(tmp_path) as fleet:
        first = fleet.prefill(*flags, name="first", starts=False)
        second = fleet.decode("none", *flags, name="second", starts=False)
        for node in (first, second):
            node.add_flags("--prefill", f"{first.bootstrap},{second.bootstrap}")
            fleet.start(node)
        fleet.wait_ready()
        address = "127.0.0.1:1"
        assert "named by admin" in admin("peers", second.url, "--add", address)
        assert f"\n{address} " in admin("peers", second.url)
        admin("peers", second.url, "--remove", address)
        wait_until("it to be forgotten", lambda: f"\n{address} " not in admin("peers", second.url))
        assert "is none of this" in admin("peers", second.url, "--remove", address, code=1)
        assert "dials nobody" in admin("peers", first.url, "--add", address, code=1)

        assert "is a prefill server now" in admin("switch", second.url, "prefill")
        assert "is a decode server now" in admin("switch", first.url, "decode")
        assert "is a decode server already" in admin("switch", first.url, "decode")
        first.wait_ready()
        shown = json.loads(admin("fleet", second.url, "--json"))
        roles = {row["url"]: row["role"] for row in shown["servers"]}
        assert roles == {second.server.url: "prefill", first.server.url: "decode"}
