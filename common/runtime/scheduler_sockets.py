"""The sockets of a scheduler process: its frontend, its workers, its peers, and the processes that
it watches. Messages in place of bytes.

Decides nothing, and knows nothing of a core or of the time.
"""

from __future__ import annotations

from collections.abc import Callable

from common.channel.keys import load_own_curve
from common.channel.local import LocalServer
from common.channel.poller import Poller
from common.channel.sockets import SendResult
from common.config import ServerConfig
from common.errors import ProtocolError
from common.protocol.codec import (
    decode_frontend_to_scheduler,
    decode_worker_to_scheduler,
    encode,
)
from common.protocol.frontend import FrontendToScheduler
from common.protocol.worker import SchedulerToWorker, WorkerToScheduler
from common.runtime.frontend_link import LAST_MESSAGES_MS, FrontendLink
from common.runtime.peer_endpoint import PeerEnd, PeerEndpoint
from common.runtime.processes import ProcessWatch


class SchedulerSockets:
    """One thread uses it. `poll` is the only call that blocks."""

    def __init__(
        self,
        config: ServerConfig,
        open_peers: Callable[[ServerConfig], PeerEnd],
        warn: Callable[[str], None],
    ) -> None:
        """warn: writes a log line, at a limited rate, because other processes can cause any number.

        Raises: ConfigError naming the setting that can't be used.
        """
        self._warn = warn
        remote_ranks = set(range(config.rank_count)) - set(config.local_ranks)
        self._workers = LocalServer(
            config.scheduler_ipc_path,
            config.scheduler_address,
            [f"worker-{rank}" for rank in remote_ranks],
            load_own_curve(config.curve_secret_key_file),
        )
        self._ranks = {f"worker-{rank}": rank for rank in range(config.rank_count)}
        self.frontend = FrontendLink(config.frontend_ipc_path)
        self.peers = PeerEndpoint(open_peers(config), warn)
        self._poller = Poller()
        self._poller.register(self._workers)
        self._poller.register(self.frontend.endpoint)
        self._poller.register(self.peers.links)
        self._processes = ProcessWatch()
        self._readable_fds: list[int] = []

    def poll(self, timeout_s: float) -> None:
        """Wait until a socket or a watched process has news, or the time is over."""
        self._poller.wait_writable(self.frontend.endpoint, waits=self.frontend.has_unsent)
        ready = self._poller.poll(timeout_s)
        self._readable_fds = [source for source in ready if isinstance(source, int)]

    def receive_frontend(self) -> list[FrontendToScheduler]:
        """Messages of the frontend, oldest first. Never waits."""
        messages: list[FrontendToScheduler] = []
        for payload in self.frontend.receive():
            try:
                messages.append(decode_frontend_to_scheduler(payload))
            except ProtocolError as error:
                self._warn(f"dropped a message of the frontend: {error}")
        return messages

    def receive_workers(self) -> list[tuple[int, WorkerToScheduler]]:
        """(rank, message) of workers, oldest first per worker. Never waits."""
        messages: list[tuple[int, WorkerToScheduler]] = []
        for name, payload in self._workers.receive():
            try:
                if name in self._ranks:
                    messages.append((self._ranks[name], decode_worker_to_scheduler(payload)))
            except ProtocolError as error:
                self._warn(f"dropped a message of {name!r}: {error}")
        for key in self._workers.take_refusals():
            self._warn(
                f"refused a worker with the unknown {key}: all machines of a server need the same "
                "--curve-secret-key-file"
            )
        return messages

    def send_workers(self, message: SchedulerToWorker) -> list[str]:
        """The same message to every worker. Returns those that did not take it."""
        payload = encode(message)
        results = {name: self._workers.send(name, payload) for name in self._ranks}
        return [name for name, result in results.items() if result is not SendResult.SENT]

    def send_worker(self, rank: int, message: SchedulerToWorker) -> None:
        """A message to a worker that was just heard."""
        self._workers.send(f"worker-{rank}", encode(message))

    def watch_processes(self, key: str, pids: tuple[int, ...]) -> None:
        """Have `take_gone` report `key` when these processes of this host have all ended."""
        for fd in self._processes.watch(key, pids):
            self._poller.register(fd)

    def take_gone(self) -> list[str]:
        """Keys of `watch_processes` whose processes have ended, as far as `poll` has seen."""
        gone, finished = self._processes.take_gone(self._readable_fds)
        self._readable_fds = []
        for fd in finished:
            self._poller.unregister(fd)
        self._processes.close(finished)
        return gone

    def close(self) -> None:
        """Queued messages may take LAST_MESSAGES_MS to leave."""
        self.peers.close(LAST_MESSAGES_MS)
        self.frontend.close()
        self._workers.close(LAST_MESSAGES_MS)
