"""Keys of the control channel: our own, those of peers, and `python -m common.channel.keys`.

Every server has one CurveZMQ key pair in a file of its own, and a file of the public keys of its
peers, one per line in hexadecimal, with the address where a prefill server answers, or a name:

    # KEY                                   ADDRESS or NAME
    5f1c...(64 digits)                      10.0.0.1:8998
    09ab...                                 decode-0

A decode server dials an address with the key of its line, or of the line `*`. Knows nothing of
sockets.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from common.config_keys import read_secret_text
from common.errors import ConfigError

KEY_NBYTES = 32
ANY_ADDRESS = "*"
SECRET_FLAG, PEERS_FLAG = "--curve-secret-key-file", "--curve-peer-keys-file"
_KEY = re.compile(r"[0-9a-fA-F]{64}")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Two CURVE keys of KEY_NBYTES bytes. The secret one is never shown."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.hex()})"


class PeerKeys:
    """Public keys of peers, read again whenever their file changes. One thread uses it."""

    def __init__(self, path: str) -> None:
        """Raises: ConfigError naming the file and the line."""
        self._path = path
        self._version = self._look()
        self._names = parse_peer_keys(path, _read(path))

    def allows(self, public: bytes) -> bool:
        self._refresh()
        return public in self._names.values()

    def key_of(self, address: str) -> bytes:
        """The key of the prefill server at an address. Raises: ConfigError if there is none."""
        self._refresh()
        key = self._names.get(address) or self._names.get(ANY_ADDRESS)
        if key is None:
            raise ConfigError(f"{PEERS_FLAG} {self._path}: has no key for {address}")
        return key

    def _look(self) -> tuple[int, int, int]:
        """Changes whenever the file does; zeros if it is not there."""
        try:
            found = os.stat(self._path)
        except OSError:
            return (0, 0, 0)
        return (found.st_ino, found.st_mtime_ns, found.st_size)

    def _refresh(self) -> None:
        version = self._look()
        if version == self._version:
            return
        self._version = version
        try:
            self._names = parse_peer_keys(self._path, _read(self._path))
        except ConfigError as error:
            log.warning("%s; the keys that were read before stay in use", error)
            return
        log.info("read %d keys of peers from %s", len(self._names), self._path)


@dataclass(frozen=True, slots=True)
class OwnKey:
    """Stands for `PeerKeys` where only processes of one server talk, which share its key pair."""

    public: bytes

    def allows(self, public: bytes) -> bool:
        return public == self.public

    def key_of(self, address: str) -> bytes:
        return self.public


@dataclass(frozen=True, slots=True)
class Curve:
    """The keys of one server's control channel."""

    pair: KeyPair
    peers: PeerKeys | OwnKey


def load_curve(secret_path: str, peers_path: str) -> Curve | None:
    """None if a server has no keys. Raises: ConfigError naming the file and what is wrong."""
    if not secret_path and not peers_path:
        return None
    return Curve(read_key_pair(secret_path), PeerKeys(peers_path))


def load_own_curve(secret_path: str) -> Curve | None:
    """For the processes of a server that is spread over machines; None if it has no keys.

    Raises: ConfigError naming the file and what is wrong.
    """
    if not secret_path:
        return None
    pair = read_key_pair(secret_path)
    return Curve(pair, OwnKey(pair.public))


def read_key_pair(path: str) -> KeyPair:
    """The pair of a secret key's file. Raises: ConfigError, which does not show it."""
    text = read_secret_text(SECRET_FLAG, path).strip()
    if not _KEY.fullmatch(text):
        raise ConfigError(f"{SECRET_FLAG} {path}: must hold one key of 64 hexadecimal digits")
    secret = bytes.fromhex(text)
    return KeyPair(z85.decode(zmq.curve_public(z85.encode(secret))), secret)


def parse_peer_keys(where: str, text: str) -> dict[str, bytes]:
    """Name or address -> public key. Raises: ConfigError naming the line."""
    names: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not _KEY.fullmatch(words[0]):
            raise ConfigError(
                f"{PEERS_FLAG} {where}: line {number} must be a public key of 64 hexadecimal "
                "digits and an address host:port, a name, or *"
            )
        if words[1] in names:
            raise ConfigError(f"{PEERS_FLAG} {where}: line {number}: {words[1]} is given twice")
        names[words[1]] = bytes.fromhex(words[0])
    return names


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{PEERS_FLAG} {path}: can't be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{PEERS_FLAG} {path}: must be text") from exc


# ---- python -m common.channel.keys ---------------------------------------------------------------


def write_key_pair(path: Path) -> KeyPair:
    """Make a pair and write its secret key, readable by its owner alone.

    Raises: ConfigError if the file is there already or can't be written.
    """
    public, secret = (z85.decode(key) for key in zmq.curve_keypair())
    try:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as exc:
        raise ConfigError(f"{path}: is there already, and is not overwritten") from exc
    except OSError as exc:
        raise ConfigError(f"{path}: can't be written: {exc.strerror}") from exc
    with os.fdopen(opened, "w") as file:
        os.fchmod(opened, 0o600)
        file.write(f"{secret.hex()}\n")
    return KeyPair(public, secret)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="baton-keys", description="Makes the key pair of one server's control channel."
    )
    parser.add_argument("path", type=Path, help="file to write the secret key to, mode 0600")
    parser.add_argument(
        "--name", help="host:port of a prefill server's bootstrap port, or any name [the file's]"
    )
    args = parser.parse_args()
    try:
        pair = write_key_pair(args.path)
    except ConfigError as error:
        sys.stderr.write(f"baton-keys: {error}\n")
        return 2
    sys.stderr.write(
        f"{args.path}: the secret key; stays on this server: {SECRET_FLAG} {args.path}\n"
        f"The line below goes into the file that this server's peers read: {PEERS_FLAG} FILE\n"
    )
    sys.stdout.write(f"{pair.public.hex()} {args.name or args.path.stem}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
