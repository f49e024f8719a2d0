"""Where the addresses of prefill servers come from while a decode server runs.

    name servers, files ─► WantedPeers ─► SetPeers to the scheduler, whenever anything has changed
    operators           ─┘

Names are looked up as every program of the machine does it (getaddrinfo), so /etc/hosts, search
domains and /etc/resolv.conf count. What can't be looked up or read keeps what is known. Knows
nothing of HTTP, nor of what becomes of a connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from common.channel.address import make_address, parse_address
from common.clock import Clock
from common.errors import BatonError, ConfigError
from common.frontend.peers.wanted import WANTED_COUNT_MAX, WantedPeers
from common.frontend.requests.scheduler_client import SchedulerClient
from common.prefill_entries import DnsName, read_entry
from common.protocol.frontend import ServerInfo, SetPeers

T = TypeVar("T")
Look = Callable[[], list[str] | None]

# New servers are waited for by requests, which give up after ten seconds.
DNS_INTERVAL_S = 3.0
FILE_INTERVAL_S = 0.5
TELL_INTERVAL_S = 0.5
FILE_NBYTES_MAX = 1 << 20
NAMES_NOTHING = "names no prefill server at the moment"
# Answers of getaddrinfo, and not failures of it. EAI_NODATA is not in every C library.
NO_ADDRESS = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}

logger = logging.getLogger(__name__)


class LookUpFailed(BatonError):
    """A source can't say what it names now."""


class PeerSources:
    """wanted: what is known. problems: by source, why it is of no use now; none for those that are.

    has_peers: whether this server dials any; a prefill server and one that is alone have none.
    """

    def __init__(self, entries: tuple[str, ...], scheduler: SchedulerClient, clock: Clock) -> None:
        """entries: of --prefill. Raises: ValueError if one is none."""
        found = {entry: read_entry(entry) for entry in entries}
        fixed = [one for one in found.values() if isinstance(one, str)]
        self._sources = {entry: one for entry, one in found.items() if not isinstance(one, str)}
        self.wanted = WantedPeers(fixed, self._sources)
        self.problems: dict[str, str] = {}
        self._scheduler = scheduler
        self._clock = clock
        self.has_peers = bool(entries)
        self._told: SetPeers | None = None
        self._told_to: ServerInfo | None = None

    async def run(self) -> None:
        """Look and tell until cancelled; returns at once where nobody is dialled."""
        if not self.has_peers:
            return
        async with asyncio.TaskGroup() as tasks:
            for entry, source in self._sources.items():
                if isinstance(source, DnsName):
                    look: Look = partial(look_up, source)
                    tasks.create_task(self._follow(entry, look, DNS_INTERVAL_S, is_strict=False))
                else:
                    look = FileReader(source.path).read
                    tasks.create_task(self._follow(entry, look, FILE_INTERVAL_S, is_strict=True))
            tasks.create_task(self._tell_on())

    # ---- looking ---------------------------------------------------------------------------------

    async def _follow(self, entry: str, look: Look, interval_s: float, *, is_strict: bool) -> None:
        """is_strict: see `WantedPeers.set_named`. What is not in a file was taken out of it; a
        server that is in no answer of a name server may work all the same."""
        while True:
            try:
                found = await in_thread(look)
            except LookUpFailed as error:
                self.note_problem(entry, str(error))
            else:
                if found is not None:
                    self.note_found(entry, found, is_strict=is_strict)
            await asyncio.sleep(interval_s)

    def note_found(self, entry: str, addresses: list[str], *, is_strict: bool) -> None:
        """What a source names now."""
        now = self._clock.now()
        if self.wanted.set_named(entry, addresses, now, is_strict=is_strict):
            self._note_change(entry)
        if not addresses:
            self.note_problem(entry, NAMES_NOTHING)
        elif self.problems.pop(entry, ""):
            logger.info("%s names %d prefill servers", entry, len(addresses))

    def _note_change(self, entry: str) -> None:
        count = len(self.wanted.addresses)
        logger.info("%s has changed: %d prefill servers are wanted", entry, count)
        if self.wanted.dropped_count:
            logger.warning(
                "%d prefill servers are named beyond the first %d, and not used",
                self.wanted.dropped_count,
                WANTED_COUNT_MAX,
            )
        self.tell()

    def note_problem(self, entry: str, problem: str) -> None:
        """Said once for each change. What the source named before stays wanted."""
        if self.problems.get(entry) != problem:
            self.problems[entry] = problem
            logger.warning("%s: %s", entry, problem)

    # ---- telling ---------------------------------------------------------------------------------

    async def _tell_on(self) -> None:
        """A scheduler knows the addresses of its settings when it starts, and no others."""
        await self._scheduler.wait_ready()
        while True:
            state = self._scheduler.state
            if state is not None:
                shown = {peer.address for peer in state.peers}
                self.wanted.forget_lapsed(shown, self._clock.now())
            self.tell()
            await asyncio.sleep(TELL_INTERVAL_S)

    def tell(self) -> None:
        """Tell a scheduler that is ready what it does not know; what has no room goes later."""
        info, message = self._scheduler.server_info, self.wanted.message()
        is_known = info is self._told_to and message == self._told
        if info is not None and not is_known and self._scheduler.set_peers(message):
            self._told, self._told_to = message, info

    # ---- operators -------------------------------------------------------------------------------

    def add(self, address: str) -> bool:
        """Whether there is room for it."""
        is_added = self.wanted.add(address)
        if is_added:
            logger.info("prefill server %s was added by an operator", address)
            self.tell()
        return is_added

    def remove(self, address: str) -> bool:
        """Whether it was wanted."""
        is_removed = self.wanted.remove(address)
        if is_removed:
            logger.info("prefill server %s was removed by an operator", address)
            self.tell()
        return is_removed


def look_up(source: DnsName) -> list[str]:
    """All addresses of a name now, in order; none if it has none. Blocks. Raises: LookUpFailed."""
    try:
        found = socket.getaddrinfo(source.name, source.port, type=socket.SOCK_STREAM)
    except socket.gaierror as exc:
        if exc.errno in NO_ADDRESS:
            return []
        raise LookUpFailed(f"can't be looked up: {exc.strerror}") from exc
    except (OSError, UnicodeError) as exc:
        raise LookUpFailed(f"can't be looked up: {exc}") from exc
    hosts = {str(where[0]) for *_, where in found}
    return sorted(str(make_address(host, source.port)) for host in hosts)


class FileReader:
    """One file of addresses. A content counts once it was read twice in a row: while a file is
    written in place, parts of it are read."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._content: bytes | None = None

    def read(self) -> list[str] | None:
        """What the file says; None if it has just changed. Blocks. Raises: LookUpFailed."""
        try:
            with Path(self._path).open("rb") as file:
                content = file.read(FILE_NBYTES_MAX + 1)
        except OSError as exc:
            raise LookUpFailed(f"can't be read: {exc.strerror}") from exc
        is_settled = self._content in (None, content)
        self._content = content
        return parse_file(content) if is_settled else None


def parse_file(content: bytes) -> list[str]:
    """One address a line, # begins a comment. Raises: LookUpFailed naming a line that is none: then
    nothing of the file is used."""
    if len(content) > FILE_NBYTES_MAX:
        raise LookUpFailed(f"has more than {FILE_NBYTES_MAX} bytes")
    try:
        lines = content.decode("ascii").splitlines()
    except UnicodeDecodeError as exc:
        raise LookUpFailed("must be ASCII text") from exc
    found: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text:
            try:
                found[str(parse_address(text))] = None
            except ConfigError as error:
                raise LookUpFailed(f"line {number}: {error}") from error
    return list(found)


async def in_thread(call: Callable[[], T]) -> T:
    """The result of a call that may block for long. Its thread keeps nobody waiting: the pool that
    reads large bodies is another one, and a process that ends does not wait for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result: T | None = None
        error: Exception | None = None
        try:
            result = call()
        except Exception as exc:  # noqa: BLE001 - raised where the call is awaited
            error = exc
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="peer-sources", daemon=True).start()
    return await future
