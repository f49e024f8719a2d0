"""Real servers with keys: who has the right ones works, everybody else is told why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.channel.keys import write_key_pair
from tests.e2e.fleet import Fleet, Node, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

BODY: dict[str, object] = {
    "text": "The capital of France is",
    "sampling_params": {"max_new_tokens": 6, "temperature": 0},
}
ADMIN = "sk-admin"


def curve(directory: Path, name: str, **peers: str) -> list[str]:
    """Flags of a server with the key pair `name`; peers: name or address -> key pair."""
    file = directory / f"{name}.peers"
    file.write_text("".join(f"{public(directory, p)} {n}\n" for n, p in peers.items()))
    secret = directory / name
    return ["--curve-secret-key-file", str(secret), "--curve-peer-keys-file", str(file)]


def public(directory: Path, name: str) -> str:
    """The public key of a pair, which is made when it is first asked for."""
    found = directory / f"{name}.pub"
    if not found.exists():
        found.write_text(write_key_pair(directory / name).public.hex())
    return found.read_text()


def detail(node: Node) -> str:
    """What a decode server says of the one prefill server it can't use; "" before it says so."""
    return "".join(peer.detail for peer in node.refusals())


def flush(fleet: Fleet, node: Node, key: str) -> int:
    """The status of a /flush_cache with an HTTP key."""
    headers = {"Authorization": f"Bearer {key}"}
    return fleet.client.post(f"{node.url}/flush_cache", headers=headers).status_code


def test_a_pair_with_keys_works_and_nobody_else_gets_in(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prefill", "decode", "stranger"):
        public(tmp_path, name)
    prefill = fleet.prefill(*curve(tmp_path, "prefill", d0="decode"), "--page-size", "32")
    at = {prefill.bootstrap: "prefill"}
    # Through staging slots, so that the ranks' own connection is locked as well.
    good = fleet.decode(
        [prefill],
        *curve(tmp_path, "decode", **at),
        "--transfer-mode",
        "staged",
        "--page-size",
        "16",
    )
    stranger = fleet.decode([prefill], *curve(tmp_path, "stranger", **at), name="stranger")
    monkeypatch.setenv("BATON_ADMIN_API_KEY", ADMIN)
    bare = fleet.decode([prefill], name="bare")
    good.wait_ready()
    alone = good.generate(BODY)
    assert alone.meta_info.completion_tokens == 6
    (peer,) = good.info().peers
    assert peer.state == "connected" and any("staged" in how for how in peer.transfer_mode)

    wait_until("the stranger to be refused", lambda: "does not know our key" in detail(stranger))
    wait_until("the bare one to be refused", lambda: "keys" in detail(bare))
    assert len(prefill.info().peers) == 1, "nobody else came as far as a handshake"
    assert f"unknown key {public(tmp_path, 'stranger')}" in prefill.log
    assert prefill.log.count("unknown key") == 1
    assert prefill.info().counters["refused_links"] >= 2
    assert [flush(fleet, bare, key) for key in ("none", ADMIN)] == [401, 200]
    assert ADMIN not in bare.log + bare.get("/server_info").text

    curve(tmp_path, "prefill", d0="decode", d1="stranger")  # its key is made known
    stranger.wait_ready()
    assert stranger.generate(BODY).output_ids == alone.output_ids
