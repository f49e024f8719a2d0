"""CurveZMQ on real sockets: who holds a known key gets in, everybody else gets nowhere."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.channel.gate import Gate
from common.channel.keys import Curve, PeerKeys, load_curve, parse_peer_keys, write_key_pair
from common.channel.peer import PeerDialer, PeerListener
from common.channel.poller import Poller
from common.channel.sockets import SendResult
from common.errors import ConfigError
from tests.channel.test_peer_channel import receive_one, send_until

PATIENCE_COUNT = 400
POLL_S = 0.02
WRONG_KEY_OF_OURS = (
    "closed during the CURVE handshake; the peer has no keys, or a wrong key of ours in its "
    "--curve-peer-keys-file"
)
WRONG_KEY_OF_PEER = (
    "closed during the CURVE handshake; the peer has no keys, or another key than our "
    "--curve-peer-keys-file says"
)
# The side that first sees that only one has keys closes the connection; the other sees the end.
WITH_KEYS = {
    "the peer has no CURVE keys, and we have: set its --curve-secret-key-file and "
    "--curve-peer-keys-file",
    WRONG_KEY_OF_OURS,
    WRONG_KEY_OF_PEER,
}
WITHOUT_KEYS = {
    "the peer requires CURVE keys, and we have none: set --curve-secret-key-file and "
    "--curve-peer-keys-file",
    "closed during the ZMTP handshake; the peer may require CURVE keys",
}


class Cluster:
    """Key pairs by name, one file of public keys for all, and the sockets of a test."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.directory, self.peers_path, self._stack = directory, directory / "peers", stack
        self.names: dict[str, str] = {}

    def make(self, name: str, *, is_known: bool = True) -> None:
        pair = write_key_pair(self.directory / name)
        if is_known:
            self.names[name] = pair.public.hex()
        self.write()

    def write(self) -> None:
        """A new file in the old one's place, as editors and configuration tools leave it."""
        lines = "".join(f"{key}  {name}  # a peer\n" for name, key in self.names.items())
        fresh = self.directory / "peers.new"
        fresh.write_text("# KEY NAME\n\n" + lines)
        fresh.rename(self.peers_path)

    def curve(self, name: str) -> Curve:
        curve = load_curve(str(self.directory / name), str(self.peers_path))
        assert curve is not None
        return curve

    def listen(self, name: str) -> PeerListener:
        gate = Gate(self.curve(name)) if name else None
        if gate is not None:
            self._stack.callback(gate.close)
        return self._stack.enter_context(contextlib.closing(PeerListener("127.0.0.1", 0, gate)))

    def dial(self, name: str, listener: PeerListener, server: str) -> tuple[PeerDialer, str]:
        """Dial with the key `name`, where the server is thought to have the key `server`."""
        link = f"127.0.0.1:{listener.port}"
        if server:
            self.names[link] = self.names[server]
            self.write()
        curve = self.curve(name) if name else None
        dialer = self._stack.enter_context(contextlib.closing(PeerDialer(curve)))
        dialer.dial(link)
        return dialer, link


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        made = Cluster(tmp_path, stack)
        for name in ("prefill", "decode", "other"):
            made.make(name)
        made.make("stranger", is_known=False)
        yield made


def refused(dialer: PeerDialer, listener: PeerListener) -> tuple[set[str], set[str]]:
    """Why connections came to nothing, as (the dialler, the listener) tells it."""
    poller = Poller()
    poller.register(dialer)
    poller.register(listener)
    ours: set[str] = set()
    theirs: set[str] = set()
    for _ in range(PATIENCE_COUNT):
        for link in list(dialer._sockets):
            dialer.send(link, b"let me in")
        assert listener.receive() == [], "nobody without a known key is heard"
        assert dialer.receive() == []
        ours |= {why for _, why in dialer.take_refusals()}
        theirs |= {why for _, why in listener.take_refusals()}
        if ours and theirs:
            return ours, theirs
        poller.poll(POLL_S)
    raise AssertionError(f"only told: {ours}, {theirs}")


def let_in(dialer: PeerDialer, listener: PeerListener, link: str) -> str:
    """The link's name at the listener after a message each way."""
    poller = Poller()
    poller.register(dialer)
    poller.register(listener)
    heard: list[tuple[str, bytes]] = []
    for _ in range(PATIENCE_COUNT):
        dialer.send(link, b"hello")
        heard = heard or listener.receive()
        if heard:
            assert listener.send(heard[0][0], b"welcome") is SendResult.SENT
            assert receive_one(dialer) == (link, b"welcome")
            return heard[0][0]
        poller.poll(POLL_S)
    raise AssertionError(f"never let in: {dialer.take_refusals()} {listener.take_refusals()}")


def test_known_keys_carry_both_ways(cluster: Cluster) -> None:
    listener = cluster.listen("prefill")
    dialer, link = cluster.dial("decode", listener, "prefill")
    name = let_in(dialer, listener, link)
    assert name.endswith(f".{cluster.names['decode']}"), "a link is named by its key as well"


def test_an_unknown_key_is_refused_and_both_sides_say_so(cluster: Cluster) -> None:
    listener = cluster.listen("prefill")
    dialer, _ = cluster.dial("stranger", listener, "prefill")
    ours, theirs = refused(dialer, listener)
    assert ours == {"the peer does not know our key: add it to its --curve-peer-keys-file"}
    (why,) = theirs
    assert why.startswith("unknown key ") and why.endswith(" of 127.0.0.1")


def test_a_server_with_the_key_of_another_is_not_talked_to(cluster: Cluster) -> None:
    listener = cluster.listen("prefill")
    dialer, _ = cluster.dial("decode", listener, "other")
    ours, theirs = refused(dialer, listener)
    assert ours == {WRONG_KEY_OF_PEER}
    assert theirs == {WRONG_KEY_OF_OURS}


def test_who_has_no_keys_is_refused(cluster: Cluster) -> None:
    listener = cluster.listen("prefill")
    dialer, _ = cluster.dial("", listener, "")
    ours, theirs = refused(dialer, listener)
    assert ours <= WITHOUT_KEYS and theirs <= WITH_KEYS


def test_who_has_keys_does_not_talk_to_one_without(cluster: Cluster) -> None:
    listener = cluster.listen("")
    dialer, _ = cluster.dial("decode", listener, "prefill")
    ours, theirs = refused(dialer, listener)
    assert ours <= WITH_KEYS and theirs <= WITHOUT_KEYS


def test_a_key_that_is_added_is_let_in_and_one_that_is_taken_out_is_not_heard_any_more(
    cluster: Cluster,
) -> None:
    listener = cluster.listen("prefill")
    dialer, link = cluster.dial("stranger", listener, "prefill")
    refused(dialer, listener)
    cluster.names["stranger"] = cluster.curve("stranger").pair.public.hex()
    cluster.write()
    dialer.hang_up(link)
    dialer.dial(link)
    let_in(dialer, listener, link)

    while listener.receive():
        pass
    del cluster.names["stranger"]
    cluster.write()
    send_until(dialer, link, b"still there", SendResult.SENT)
    poller = Poller()
    poller.register(listener)
    assert poller.poll(20.0) == [listener]
    assert listener.receive() == []


def test_a_file_that_was_broken_later_changes_nothing(cluster: Cluster) -> None:
    listener = cluster.listen("prefill")
    dialer, link = cluster.dial("decode", listener, "prefill")
    cluster.peers_path.write_text("half a li")
    let_in(dialer, listener, link)


def test_an_address_without_a_key_is_not_dialled_unless_there_is_one_for_all(
    cluster: Cluster,
) -> None:
    with contextlib.closing(PeerDialer(cluster.curve("decode"))) as dialer:
        with pytest.raises(ConfigError, match=r"peers: has no key for 10\.0\.0\.9:8998"):
            dialer.dial("10.0.0.9:8998")
        cluster.names["*"] = cluster.names["prefill"]
        cluster.write()
        dialer.dial("10.0.0.9:8998")


def test_a_dropped_link_is_not_heard_any_more(cluster: Cluster) -> None:
    listener = cluster.listen("prefill")
    dialer, link = cluster.dial("decode", listener, "prefill")
    name = let_in(dialer, listener, link)
    listener.drop(name)
    send_until(dialer, link, b"again", SendResult.SENT)
    poller = Poller()
    poller.register(listener)
    assert poller.poll(20.0) == [listener]
    assert listener.receive() == []
    dialer.hang_up(link)
    dialer.dial(link)
    assert let_in(dialer, listener, link) != name


# ---- files ---------------------------------------------------------------------------------------

KEY = "0f" * 32


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (f"{KEY}", "line 1 must be a public key of 64 hexadecimal digits and an address"),
        (f"# fine\n{KEY[1:]} a:1", "line 2 must be"),
        (f"{KEY}0 a:1", "line 1 must be"),
        (f"{KEY} a:1 b:2", "line 1 must be"),
        (f"{KEY} a:1\n{KEY} a:1", "line 2: a:1 is given twice"),
    ],
)
def test_a_line_that_is_no_key_is_named(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"--curve-peer-keys-file F: {complaint}"):
        parse_peer_keys("F", text)


def test_files_that_can_not_be_used_are_named_without_the_key(tmp_path: Path) -> None:
    secret, peers = tmp_path / "secret", tmp_path / "peers"
    peers.write_text("")
    with pytest.raises(ConfigError, match=r"--curve-secret-key-file .*secret: can't be read"):
        load_curve(str(secret), str(peers))
    secret.touch(mode=0o600)
    secret.write_text("not a key")
    with pytest.raises(ConfigError, match=r"secret: must hold one key of 64") as caught:
        load_curve(str(secret), str(peers))
    assert "not a key" not in str(caught.value)
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match=r"secret: has mode 0644, others can read it"):
        load_curve(str(secret), str(peers))
    with pytest.raises(ConfigError, match=r"--curve-peer-keys-file .*none: can't be read"):
        PeerKeys(str(tmp_path / "none"))


@pytest.mark.slow
def test_the_command_makes_a_pair_that_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.key"

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "common.channel.keys", str(path), "--name", "d0"]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, preexec_fn=open_umask
        )

    open_umask: Callable[[], None] = lambda: os.umask(0) and None  # noqa: E731
    done = run()
    assert (done.returncode, path.stat().st_mode & 0o777) == (0, 0o600)
    peers = tmp_path / "peers"
    peers.write_text(done.stdout)
    curve = load_curve(str(path), str(peers))
    assert curve is not None and curve.peers.allows(curve.pair.public)
    secret = path.read_text().strip()
    assert secret not in done.stdout + done.stderr + repr(curve)
    again = run()
    assert again.returncode == 2 and "is not overwritten" in again.stderr
    assert path.read_text().strip() == secret
